"""A web shop with a login, tables of its own and a page: lists and exports run as Tasks."""
