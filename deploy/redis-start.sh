#!/bin/sh
# Starts Redis with redis.conf and the users of users.acl, with passwords from
# files. More arguments are passed on and win.
#
#   SECRETS_DIR  folder with redis_gateway_password, redis_writer_password and
#                redis_operator_password; default /run/secrets
#   ACL_FILE     where the finished list of users goes; default /tmp/users.acl
#   DATA_DIR     data folder; default /data
set -eu
umask 077
here=$(dirname "$0")
secrets=${SECRETS_DIR:-/run/secrets}
acl=${ACL_FILE:-/tmp/users.acl}

# The password file's SHA-256 without its line end, as the programs read it.
sum() {
    file=$secrets/redis_$1_password
    if [ -z "$(tr -d '\r\n' <"$file")" ]; then
        echo "redis-start: $file is missing or empty" >&2
        exit 1
    fi
    tr -d '\r\n' <"$file" | sha256sum | cut -d ' ' -f 1
}
gateway=$(sum gateway)
writer=$(sum writer)
operator=$(sum operator)

sed -e '/^[[:space:]]*#/d' \
    -e "s/@GATEWAY_SHA256@/$gateway/" -e "s/@WRITER_SHA256@/$writer/" -e "s/@OPERATOR_SHA256@/$operator/" \
    "$here/users.acl" |
    awk '/^user / { if (line) print line; line = $0; next }
         NF       { sub(/^[ \t]+/, ""); line = line " " $0 }
         END      { print line }' >"$acl"

exec redis-server "$here/redis.conf" --aclfile "$acl" --dir "${DATA_DIR:-/data}" \
    --bind '*' '-::*' --port 6379 "$@"
