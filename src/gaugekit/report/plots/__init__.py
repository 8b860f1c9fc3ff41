"""The plots of a page, each file one family of them."""
