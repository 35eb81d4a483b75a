#!/bin/sh
# Runs one of the SQL files beside it as the database's administrator, with
# passwords from files: mysql-apply.sh users.sql, mysql-apply.sh grants.sql.
#
#   MYSQL_HOST   default mysql
#   SECRETS_DIR  folder with mysql_root_password, mysql_migrator_password and
#                mysql_writer_password; default /run/secrets
set -eu
umask 077
here=$(dirname "$0")
secrets=${SECRETS_DIR:-/run/secrets}

# A password as it may stand in an SQL string: nothing that would end one.
password() {
    value=$(tr -d '\r\n' <"$secrets/mysql_$1_password")
    case $value in
    '' | *[!0-9A-Za-z_.-]*)
        echo "mysql-apply: $secrets/mysql_$1_password must hold letters, digits, _ . - and nothing else" >&2
        exit 1
        ;;
    esac
    printf '%s' "$value"
}
root=$(password root)
migrator=$(password migrator)
writer=$(password writer)

# Not on the command line, where everybody on the machine could read it.
login=$(mktemp)
trap 'rm -f "$login"' EXIT
printf '[client]\nuser=root\npassword=%s\n' "$root" >"$login"

sed -e "s/@MIGRATOR_PASSWORD@/$migrator/g" -e "s/@WRITER_PASSWORD@/$writer/g" "$here/$1" |
    mysql --defaults-extra-file="$login" --host="${MYSQL_HOST:-mysql}"
