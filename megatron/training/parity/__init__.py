"""Train one small model at any layout and compare what must not depend on the layout."""
