"""One module per migration; none is changed after its release."""
