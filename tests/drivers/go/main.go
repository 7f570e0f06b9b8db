// SPDX-License-Identifier: Apache-2.0

// Command client runs checks of pgx: named statements by default, batches, pipelines, COPY.
package main

import (
	"bytes"
	"context"
	"crypto/rand"
	"errors"
	"fmt"
	"os"
	"strings"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"
	"github.com/jackc/pgx/v5/pgxpool"
)

const large = 16 << 20

var ctx = context.Background()

func url(options string) string {
	return fmt.Sprintf("host=%s port=%s user=%s password=%s dbname=%s connect_timeout=20 %s", os.Getenv("DRIVER_HOST"),
		os.Getenv("DRIVER_PORT"), os.Getenv("DRIVER_USER"), os.Getenv("DRIVER_PASSWORD"), os.Getenv("DRIVER_DB"), options)
}

func connect(options string) *pgx.Conn {
	conn, err := pgx.Connect(ctx, url(options))
	must(err)
	return conn
}

func plain() *pgx.Conn { return connect("sslmode=disable") }

func must(err error) {
	if err != nil {
		panic(err)
	}
}

func same[T comparable](actual, expected T) {
	if actual != expected {
		panic(fmt.Sprintf("got %v, expected %v", actual, expected))
	}
}

func one[T any](conn *pgx.Conn, sql string, args ...any) T {
	var value T
	must(conn.QueryRow(ctx, sql, args...).Scan(&value))
	return value
}

func fails(code string, err error) {
	var pgErr *pgconn.PgError
	if !errors.As(err, &pgErr) {
		panic(fmt.Sprintf("expected %s, got %v", code, err))
	}
	same(pgErr.Code, code)
}

type check struct {
	name string
	body func()
}

func table(suffix string) string { return os.Getenv("DRIVER_TABLE") + suffix }

var checks = []check{
	{"connect-scram", func() {
		c := plain()
		defer c.Close(ctx)
		same(one[string](c, "SELECT current_user::text"), os.Getenv("DRIVER_USER"))
	}},
	{"connect-tls-require", func() {
		c := connect("sslmode=require")
		defer c.Close(ctx)
		same(one[int](c, "SELECT 1"), 1)
	}},
	{"connect-tls-verify-full", func() {
		c := connect("sslmode=verify-full sslrootcert=" + os.Getenv("DRIVER_CA"))
		defer c.Close(ctx)
		same(one[int](c, "SELECT 1"), 1)
	}},
	{"wrong-password", func() {
		_, err := pgx.Connect(ctx, url("sslmode=disable password=no"))
		if err == nil || !strings.Contains(err.Error(), "authentication failed") {
			panic(fmt.Sprint(err))
		}
	}},
	{"exec-modes", func() {
		for _, mode := range []string{"cache_statement", "cache_describe", "describe_exec", "exec", "simple_protocol"} {
			c := connect("sslmode=disable default_query_exec_mode=" + mode)
			for n := range 10 {
				same(one[int](c, "SELECT $1::int * 2", n), n*2)
			}
			c.Close(ctx)
		}
	}},
	{"prepared", func() {
		a, b := plain(), plain()
		defer a.Close(ctx)
		defer b.Close(ctx)
		for _, c := range []*pgx.Conn{a, b} {
			_, err := c.Prepare(ctx, "double", "SELECT $1::int * 2")
			must(err)
		}
		for n := range 20 {
			for _, c := range []*pgx.Conn{a, b} {
				same(one[int](c, "double", n), n*2)
			}
		}
		must(a.Deallocate(ctx, "double"))
	}},
	// Runs only where it is asked for by name.
	{"repeated", func() {
		a, b := plain(), plain()
		defer a.Close(ctx)
		defer b.Close(ctx)
		for n := range 5000 {
			for _, c := range []*pgx.Conn{a, b} {
				same(one[int](c, "SELECT $1::int * 2", n), n*2)
			}
		}
	}},
	{"statement-cache", func() {
		c := connect("sslmode=disable statement_cache_capacity=3")
		defer c.Close(ctx)
		for n := range 30 {
			same(one[int](c, fmt.Sprintf("SELECT %d + $1::int", n%7), 1), n%7+1)
		}
	}},
	{"batch", func() {
		c := plain()
		defer c.Close(ctx)
		batch := &pgx.Batch{}
		for n := range 300 {
			batch.Queue(fmt.Sprintf("SELECT $1::int + %d", n%5), n)
		}
		results := c.SendBatch(ctx, batch)
		for n := range 300 {
			var got int
			must(results.QueryRow().Scan(&got))
			same(got, n+n%5)
		}
		must(results.Close())
	}},
	{"pipeline", func() {
		c := plain()
		defer c.Close(ctx)
		p := c.PgConn().StartPipeline(ctx)
		for n := range 100 {
			p.SendQueryParams("SELECT $1::int", [][]byte{[]byte(fmt.Sprint(n))}, nil, nil, nil)
			must(p.Sync())
		}
		for n := range 100 {
			r, err := p.GetResults()
			must(err)
			read := r.(*pgconn.ResultReader).Read()
			must(read.Err)
			same(string(read.Rows[0][0]), fmt.Sprint(n))
			_, err = p.GetResults()
			must(err)
		}
		must(p.Close())
	}},
	{"pool-of-clients", func() {
		pool, err := pgxpool.New(ctx, url("sslmode=disable pool_max_conns=8"))
		must(err)
		defer pool.Close()
		done := make(chan error, 100)
		for n := range 100 {
			go func() {
				done <- pgx.BeginFunc(ctx, pool, func(tx pgx.Tx) error {
					var got int
					if err := tx.QueryRow(ctx, "SELECT $1::int", n).Scan(&got); err != nil {
						return err
					}
					if got != n {
						return fmt.Errorf("got %d, expected %d", got, n)
					}
					return nil
				})
			}()
		}
		for range 100 {
			must(<-done)
		}
	}},
	{"copy-in-and-out", func() {
		c := plain()
		defer c.Close(ctx)
		tx, err := c.Begin(ctx)
		must(err)
		name := table("_go")
		_, err = tx.Exec(ctx, "CREATE TABLE "+name+" (a int, b text)")
		must(err)
		count, err := tx.CopyFrom(ctx, pgx.Identifier{name}, []string{"a", "b"},
			pgx.CopyFromSlice(20000, func(n int) ([]any, error) { return []any{n, fmt.Sprint("row ", n)}, nil }))
		must(err)
		same(count, 20000)
		var out bytes.Buffer
		_, err = c.PgConn().CopyTo(ctx, &out, "COPY (SELECT * FROM "+name+" ORDER BY a) TO STDOUT")
		must(err)
		same(strings.Count(out.String(), "\n"), 20000)
		same(strings.HasSuffix(out.String(), "19999\trow 19999\n"), true)
		_, err = tx.Exec(ctx, "DROP TABLE "+name)
		must(err)
		must(tx.Commit(ctx))
	}},
	{"session:listen-notify", func() {
		listener, sender := plain(), plain()
		defer listener.Close(ctx)
		defer sender.Close(ctx)
		_, err := listener.Exec(ctx, "LISTEN news")
		must(err)
		_, err = sender.Exec(ctx, "SELECT pg_notify('news', 'hello')")
		must(err)
		limited, stop := context.WithTimeout(ctx, 5*time.Second)
		defer stop()
		note, err := listener.WaitForNotification(limited)
		must(err)
		same(note.Payload, "hello")
	}},
	{"cancel", func() {
		c := plain()
		defer c.Close(ctx)
		time.AfterFunc(300*time.Millisecond, func() { _ = c.PgConn().CancelRequest(ctx) })
		_, err := c.Exec(ctx, "SELECT pg_sleep(20)")
		fails("57014", err)
		same(one[int](c, "SELECT 1"), 1)
	}},
	{"error-in-transaction", func() {
		c := plain()
		defer c.Close(ctx)
		tx, err := c.Begin(ctx)
		must(err)
		_, err = tx.Exec(ctx, "SELECT nonsense")
		fails("42703", err)
		_, err = tx.Exec(ctx, "SELECT 1")
		fails("25P02", err)
		must(tx.Rollback(ctx))
		must(pgx.BeginFunc(ctx, c, func(tx pgx.Tx) error {
			fails("22012", pgx.BeginFunc(ctx, tx, func(inner pgx.Tx) error {
				_, err := inner.Exec(ctx, "SELECT 1 / $1::int", 0)
				return err
			}))
			same(one[int](c, "SELECT 5"), 5)
			return nil
		}))
	}},
	{"large-values", func() {
		c := plain()
		defer c.Close(ctx)
		blob := make([]byte, large)
		_, _ = rand.Read(blob)
		same(bytes.Equal(one[[]byte](c, "SELECT $1::bytea", blob), blob), true)
		text := strings.Repeat("é", large/2)
		same(one[string](c, "SELECT $1::text", text) == text, true)
	}},
	{"many-parameters", func() {
		c := plain()
		defer c.Close(ctx)
		var sql strings.Builder
		sql.WriteString("SELECT count(*) FROM (VALUES ")
		args := make([]any, 30000)
		for n := range args {
			if n > 0 {
				sql.WriteByte(',')
			}
			fmt.Fprintf(&sql, "($%d::int)", n+1)
			args[n] = n
		}
		sql.WriteString(") v")
		same(one[int](c, sql.String(), args...), len(args))
	}},
	{"text-and-binary", func() {
		c := plain()
		defer c.Close(ctx)
		for _, format := range []int16{pgx.TextFormatCode, pgx.BinaryFormatCode} {
			var a int32
			var b float64
			var d time.Time
			var list []int32
			must(c.QueryRow(ctx, "SELECT $1::int4, $2::float8, $3::timestamptz, $4::int4[]",
				pgx.QueryResultFormats{format}, 7, 1.5, time.Unix(1700000000, 0), []int32{1, 2, 3}).Scan(&a, &b, &d, &list))
			same(a, 7)
			same(b, 1.5)
			same(d.Unix(), 1700000000)
			same(len(list), 3)
		}
	}},
	{"notices", func() {
		config, err := pgx.ParseConfig(url("sslmode=disable"))
		must(err)
		var seen []string
		config.OnNotice = func(_ *pgconn.PgConn, notice *pgconn.Notice) { seen = append(seen, notice.Message) }
		c, err := pgx.ConnectConfig(ctx, config)
		must(err)
		defer c.Close(ctx)
		_, err = c.Exec(ctx, "DO $$BEGIN RAISE NOTICE 'one'; RAISE WARNING 'two'; END$$")
		must(err)
		same(strings.Join(seen, " "), "one two")
	}},
	{"session-parameters", func() {
		a, b := connect("sslmode=disable application_name=one"), connect("sslmode=disable application_name=two")
		defer a.Close(ctx)
		defer b.Close(ctx)
		_, err := a.Exec(ctx, "SET TimeZone = 'Asia/Tokyo'")
		must(err)
		sql := "SELECT current_setting('TimeZone') || ' ' || current_setting('application_name')"
		for range 5 {
			same(one[string](b, sql), "UTC two")
			same(one[string](a, sql), "Asia/Tokyo one")
		}
	}},
}

func run(body func()) (message string) {
	defer func() {
		if failure := recover(); failure != nil {
			message = strings.Join(strings.Fields(fmt.Sprint(failure)), " ")
		}
	}()
	body()
	return ""
}

func main() {
	for _, check := range checks {
		name, session := strings.CutPrefix(check.name, "session:")
		if session && os.Getenv("DRIVER_MODE") == "transaction" {
			continue
		}
		if only := os.Getenv("DRIVER_ONLY"); only != "" && name != only || only == "" && name == "repeated" {
			continue
		}
		if message := run(check.body); message != "" {
			fmt.Printf("%s\tfail\t%s\n", name, message)
		} else {
			fmt.Printf("%s\tok\t\n", name)
		}
	}
}
