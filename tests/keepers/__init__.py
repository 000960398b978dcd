"""Ways to keep weights, healthy and sick, and what is said of them."""
