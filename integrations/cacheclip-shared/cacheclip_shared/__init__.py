"""A store in object storage, for any number of machines.

Payloads in the object store are the truth, one Delta table a tenant says which texts there are, and everything on a
machine is a copy that may be thrown away. There is no server of ours, no lock and no leader::

    PREFIX/store.json                     layout version, and what the store was made with
    PREFIX/tenants/TENANT/kv/ab/abcd…/int8.f2.kv
                                          payloads, with codec and frame version in the name; they never change
    PREFIX/tenants/TENANT/catalog/        Delta table, one row a text and source

``place`` opens URLs, ``objects`` is the backend, ``table`` the catalog, ``replica`` its copy on this machine, ``store``
puts them together, ``care`` makes, cleans and checks such a store.
"""
