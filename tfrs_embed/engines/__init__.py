"""Where tables live, and how they are looked up and updated."""
