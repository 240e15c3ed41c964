"""Charts and heat maps as SVG and PNG."""
