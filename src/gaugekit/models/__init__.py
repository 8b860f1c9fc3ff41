"""What is where in a transformer: views of weights, the `Spec`, and one file a family."""

from gaugekit.models.quiet import quiet
from gaugekit.models.registry import Family, parse_config, read_spec, registered
from gaugekit.models.spec import Spec
from gaugekit.models.view import Edit, View

__all__ = ["Edit", "Family", "Spec", "View", "parse_config", "quiet", "read_spec", "registered"]
