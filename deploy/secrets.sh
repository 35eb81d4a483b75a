#!/bin/sh
# Makes the passwords that compose.yaml mounts, in deploy/secrets. What is there
# stays as it is. The order key is made by compose itself, in a volume.
#
# The folder is for its owner alone. The files in it may be read by all: they are
# mounted into containers whose users are others, which do not see the folder.
set -eu
umask 077
secrets=${SECRETS_DIR:-$(dirname "$0")/secrets}
mkdir -p "$secrets"
chmod 0700 "$secrets"

put() {
    [ -s "$secrets/$1" ] && return
    printf '%s\n' "$2" >"$secrets/$1.new"
    chmod 0444 "$secrets/$1.new"
    mv "$secrets/$1.new" "$secrets/$1"
    echo "wrote $secrets/$1"
}
random() { od -An -N24 -tx1 /dev/urandom | tr -d ' \n'; }

for name in redis_gateway redis_writer redis_operator mysql_root mysql_migrator mysql_writer; do
    put "${name}_password" "$(random)"
done
for user in migrator writer; do
    put "${user}_dsn" "seckill_$user:$(cat "$secrets/mysql_${user}_password")@tcp(mysql:3306)/seckill"
done
