"""Who is there: identities, addresses, and signed records on a hivemind DHT.

Nothing is imported here, so that ``swarm.dht.addresses`` loads without hivemind and torch.
"""
