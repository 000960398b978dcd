"""PostgreSQL under Patroni, etcd and HAProxy, several servers and a replicated bucket, killed piece by piece."""
