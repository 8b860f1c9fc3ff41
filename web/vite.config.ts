import { defineConfig } from "vite";

export default defineConfig({
  base: "./", // any folder of any web server
  esbuild: { jsx: "automatic", jsxImportSource: "preact" },
  build: {
    outDir: "../src/gaugekit/lab/static",
    emptyOutDir: true,
    assetsInlineLimit: 0,
    modulePreload: { polyfill: false },
    target: "es2022",
  },
});
