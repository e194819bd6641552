"""How far a network looks, and by which steps its input may be shifted, measured on the network."""
