module github.com/seckill/seckill/migrations

go 1.26.0

require (
	github.com/go-sql-driver/mysql v1.10.1
	github.com/pressly/goose/v3 v3.30.1
	github.com/seckill/seckill/pkg v0.0.0
	github.com/stretchr/testify v1.12.1
	golang.org/x/sync v0.25.0
)

require (
	filippo.io/edwards25519 v1.2.0 // indirect
	github.com/mfridman/interpolate v0.2.0 // indirect
	github.com/sethvargo/go-retry v0.5.0 // indirect
	go.uber.org/multierr v1.11.0 // indirect
	go.yaml.in/yaml/v3 v3.0.6 // indirect
)

replace github.com/seckill/seckill/pkg => ../pkg

replace github.com/seckill/seckill/proto => ../proto
