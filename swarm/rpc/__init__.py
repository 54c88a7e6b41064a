"""gRPC: the server of a peer and the calls to one.  Adapters of StageService and StageCalls."""
