// Draws every figure in the colours of the page, and again when those change between light and dark.
"use strict";
(() => {
  const figures = JSON.parse(document.getElementById("figures").textContent);
  const dark = window.matchMedia("(prefers-color-scheme: dark)");
  const config = {
    responsive: true,
    displaylogo: false,
    typesetMath: false,
    // Named one by one: plotly's own choice has a button that sends the chart to a server.
    modeBarButtons: [["toImage", "zoomIn2d", "zoomOut2d", "resetScale2d"]],
    plotlyServerURL: "",
  };

  function template() {
    const css = getComputedStyle(document.documentElement);
    const [surface, text, muted, line, grid] = ["surface", "text", "muted", "line", "grid"].map(
      (name) => css.getPropertyValue(`--${name}`).trim()
    );
    const axis = {
      gridcolor: grid, zerolinecolor: line, linecolor: line, tickcolor: surface,
      tickfont: { color: muted }, title: { font: { color: muted }, standoff: 8 }, automargin: true,
      ticks: "outside", ticklen: 5,
    };
    const colorbar = { tickfont: { color: muted }, title: { font: { color: muted } } };
    return {
      layout: {
        font: { family: getComputedStyle(document.body).fontFamily, size: 12, color: text },
        paper_bgcolor: surface, plot_bgcolor: surface,
        margin: { l: 44, r: 16, t: 30, b: 44 },
        showlegend: false,
        // A finger that scrolls the page over a plot must not zoom it; the buttons do.
        dragmode: false,
        hoverlabel: { bgcolor: surface, bordercolor: line, font: { color: text }, align: "left", namelength: -1 },
        modebar: { bgcolor: "rgba(0,0,0,0)" },
        xaxis: axis, yaxis: axis,
      },
      data: {
        bar: [{ marker: { line: { color: surface, width: 1 } }, textfont: { color: text } }],
        heatmap: [{ colorbar }],
        scatter: [{ marker: { line: { color: surface, width: 0.5 } } }],
      },
    };
  }

  function draw() {
    const look = template();
    for (const { id, data, layout } of figures) {
      Plotly.react(id, data, { ...layout, template: look }, config);
    }
  }

  draw();
  dark.addEventListener("change", draw);
})();
