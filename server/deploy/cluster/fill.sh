#!/bin/sh
# fill.sh NUMBER FOLDER: write etcd.yml, patroni.yml and haproxy.cfg of machine NUMBER (1, 2 or 3) into FOLDER.
# Values come from cluster.env beside this script, or from the file that CLUSTER_ENV names.
set -eu
number=$1 folder=$2
here=$(cd "$(dirname "$0")" && pwd)
. "${CLUSTER_ENV:-$here/cluster.env}"
NODE=node$number
eval "ETCD=\$ETCD_$number PEER=\$PEER_$number PATRONI=\$PATRONI_$number DATABASE=\$DATABASE_$number"
umask 077
for name in etcd.yml patroni.yml haproxy.cfg; do
    # A here-document puts the values in, and fails on one that is not set.
    eval "cat <<END
$(cat "$here/$name")
END" > "$folder/$name"
done
