#!/bin/sh
# What the entry point of PostgreSQL's image does with these settings: on the first start, a cluster and a database.
set -eu
data=/var/lib/postgresql/data
if ! [ -s "$data/PG_VERSION" ]; then
    initdb --pgdata="$data" --username="$POSTGRES_USER" --pwfile="$POSTGRES_PASSWORD_FILE" --auth-host=scram-sha-256 --auth-local=trust
    echo "host all all all scram-sha-256" >> "$data/pg_hba.conf"
    pg_ctl --pgdata="$data" --options="-c listen_addresses=''" --wait start
    createdb --username="$POSTGRES_USER" "$POSTGRES_DB"
    pg_ctl --pgdata="$data" --mode=fast --wait stop
fi
exec postgres -D "$data" -c listen_addresses='*'
