"""The documentation: references made from code, links, and the site."""
