#!/bin/sh
# Makes what the services of docker-compose.yml must know of each other, once. What is there stays.
#   secrets.sh start    passwords, the server's own token, a certificate; before the database starts
#   secrets.sh tokens   brings the database up to date, and makes a token for each role
# Each service has a folder of its own under $SECRETS, readable by its user alone; `people` is for you.
# `start` places the configuration of the checkout under $CONFIGURATION, too, where every user may read it.
set -eu
umask 077
secrets=${SECRETS:-/secrets}
checkout=${CHECKOUT:-/checkout}
configuration=${CONFIGURATION:-/configuration}
name=${COLLAGE_NAME:-localhost}

# keep FOLDER/FILE VALUE: writes the file, unless it is there.
keep() {
    mkdir -p "$secrets/${1%/*}"
    [ -n "$2" ] || { echo "nothing to write into $1: the command before failed" >&2; exit 1; }
    [ -s "$secrets/$1" ] || { printf '%s\n' "$2" > "$secrets/$1.new"; mv "$secrets/$1.new" "$secrets/$1"; }
}

# own USER FOLDER: the user of that service's image, and nobody else, reads the folder.
own() {
    chmod 400 "$secrets/$2"/*
    chmod 500 "$secrets/$2"
    chown -R "$1" "$secrets/$2"
}

# place FILE TARGET: readable by every user, as the files of a checkout made under umask 077 are not.
place() {
    folder=$configuration/${2%/*}
    mkdir -p "$folder"
    chmod 755 "$folder" "$configuration/${2%%/*}"
    cp -f "$checkout/$1" "$configuration/$2"
    chmod 444 "$configuration/$2"
}

random() {
    openssl rand -base64 32 | tr '+/' '-_' | tr -d '=\n'
}

certificate() {
    case $name in
        *[!0-9.]*) alternative="DNS:$name,DNS:localhost,IP:127.0.0.1" ;;
        *) alternative="IP:$name,DNS:localhost,IP:127.0.0.1" ;;
    esac
    mkdir -p "$secrets/certificate"
    [ -s "$secrets/certificate/certificate.pem" ] || openssl req -x509 -newkey ec -pkeyopt ec_paramgen_curve:prime256v1 \
        -nodes -days 825 -subj "/CN=$name" -addext "subjectAltName=$alternative" \
        -addext keyUsage=critical,digitalSignature,keyCertSign -addext extendedKeyUsage=serverAuth \
        -keyout "$secrets/certificate/key.pem" -out "$secrets/certificate/certificate.pem"
}

start() {
    keep database/password "$(random)"
    keep server/pgpass "database:5432:collage:collage:$(cat "$secrets/database/password")"
    keep server/token "$(random)"
    keep grafana/password "$(random)"
    keep people/grafana-password "$(cat "$secrets/grafana/password")"
    certificate
    keep people/certificate.pem "$(cat "$secrets/certificate/certificate.pem")"
    own 999 database
    own 10001 server
    own 472 grafana
    own 10001 people
    own 101 certificate
    place prometheus/prometheus.yml prometheus/prometheus.yml
    place prometheus/collage.rules.yml prometheus/collage.rules.yml
    place prometheus/alertmanager.yml alertmanager/alertmanager.yml
    place deploy/grafana/datasource.yml grafana/datasources/collage.yml
    place deploy/grafana/provider.yml grafana/dashboards/collage.yml
    place deploy/grafana/dashboard.json grafana/dashboards/collage.json
    place deploy/nginx.conf proxy/nginx.conf
}

# token FOLDER USER ROLE: a token of the role for every project, unless the one in the folder still counts.
token() {
    mkdir -p "$secrets/$1"
    chmod 700 "$secrets/$1"
    collage-monitor token create --offline --name "compose: $1" --role "$3" --all-projects --output "$secrets/$1/token"
    own "$2" "$1"
}

tokens() {
    collage-monitor setup database
    token agents 10001 ingest
    token dashboard 10001 read
    token prometheus 65534 read
    token alertmanager 65534 ingest
}

"$1"
