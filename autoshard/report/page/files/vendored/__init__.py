"""Libraries of the plan page, as their npm packages have them."""
