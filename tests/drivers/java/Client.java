// SPDX-License-Identifier: Apache-2.0
// pgjdbc: extended protocol always, server-side named statements from prepareThreshold on.

import java.io.*;
import java.nio.charset.StandardCharsets;
import java.sql.*;
import java.util.*;
import org.postgresql.PGConnection;
import org.postgresql.PGStatement;
import org.postgresql.copy.CopyManager;

public class Client {
    interface Check { void run() throws Exception; }

    static final Map<String, String> ENV = System.getenv();
    static final String TABLE = ENV.get("DRIVER_TABLE");
    static final int LARGE = 16 << 20;

    static Connection connect(String... options) throws SQLException {
        Properties properties = new Properties();
        properties.put("user", ENV.get("DRIVER_USER"));
        properties.put("password", ENV.get("DRIVER_PASSWORD"));
        properties.put("sslmode", "disable");
        properties.put("loginTimeout", "20");
        for (int i = 0; i < options.length; i += 2) properties.put(options[i], options[i + 1]);
        return DriverManager.getConnection("jdbc:postgresql://" + ENV.get("DRIVER_HOST") + ":" + ENV.get("DRIVER_PORT")
            + "/" + ENV.get("DRIVER_DB"), properties);
    }

    static void same(Object actual, Object expected) {
        if (!Objects.equals(actual, expected)) throw new AssertionError("got " + actual + ", expected " + expected);
    }

    static String one(Connection c, String sql) throws SQLException {
        try (Statement s = c.createStatement(); ResultSet r = s.executeQuery(sql)) {
            r.next();
            return r.getString(1);
        }
    }

    static void execute(Connection c, String sql) throws SQLException {
        try (Statement s = c.createStatement()) { s.execute(sql); }
    }

    static void fails(String state, Check body) throws Exception {
        try {
            body.run();
        } catch (SQLException error) {
            same(error.getSQLState(), state);
            return;
        }
        throw new AssertionError("no error, expected " + state);
    }

    static void connectScram() throws Exception {
        try (Connection c = connect()) { same(one(c, "SELECT current_user"), ENV.get("DRIVER_USER")); }
    }

    static void connectTlsRequire() throws Exception {
        try (Connection c = connect("sslmode", "require")) { same(one(c, "SELECT 1"), "1"); }
    }

    static void connectTlsVerifyFull() throws Exception {
        try (Connection c = connect("sslmode", "verify-full", "sslrootcert", ENV.get("DRIVER_CA"))) {
            same(one(c, "SELECT 1"), "1");
        }
    }

    static void wrongPassword() throws Exception {
        try (Connection c = connect("password", "no")) {
            throw new AssertionError("let in");
        } catch (SQLException error) {
            if (!error.getMessage().contains("authentication failed")) throw error;
        }
    }

    static void simpleMode() throws Exception {
        try (Connection c = connect("preferQueryMode", "simple")) {
            try (PreparedStatement s = c.prepareStatement("SELECT ?::int + 1")) {
                s.setInt(1, 41);
                try (ResultSet r = s.executeQuery()) { r.next(); same(r.getInt(1), 42); }
            }
        }
    }

    static void prepared() throws Exception {
        try (Connection one = connect("prepareThreshold", "3"); Connection two = connect("prepareThreshold", "3");
             PreparedStatement s1 = one.prepareStatement("SELECT ?::int * 2");
             PreparedStatement s2 = two.prepareStatement("SELECT ?::int * 2")) {
            for (int n = 0; n < 20; n++) {
                for (PreparedStatement s : List.of(s1, s2)) {
                    s.setInt(1, n);
                    try (ResultSet r = s.executeQuery()) { r.next(); same(r.getInt(1), n * 2); }
                }
            }
            same(s1.unwrap(PGStatement.class).isUseServerPrepare(), true);
        }
    }

    /** Runs only where it is asked for by name. */
    static void repeated() throws Exception {
        try (Connection one = connect(); Connection two = connect();
             PreparedStatement s1 = one.prepareStatement("SELECT ?::int * 2");
             PreparedStatement s2 = two.prepareStatement("SELECT ?::int * 2")) {
            for (int n = 0; n < 5000; n++) {
                for (PreparedStatement s : List.of(s1, s2)) {
                    s.setInt(1, n);
                    try (ResultSet r = s.executeQuery()) { r.next(); same(r.getInt(1), n * 2); }
                }
            }
        }
    }

    static void preparedAtOnce() throws Exception {
        // prepareThreshold -1: named and binary from the first execution.
        try (Connection c = connect("prepareThreshold", "-1", "preparedStatementCacheQueries", "4")) {
            for (int n = 0; n < 40; n++) {
                try (PreparedStatement s = c.prepareStatement("SELECT " + n % 9 + " + ?::int")) {
                    s.setInt(1, 1);
                    try (ResultSet r = s.executeQuery()) { r.next(); same(r.getInt(1), n % 9 + 1); }
                }
            }
        }
    }

    static void batch() throws Exception {
        try (Connection c = connect()) {
            c.setAutoCommit(false);
            execute(c, "CREATE TABLE " + TABLE + "_batch (a int, b text)");
            try (PreparedStatement s = c.prepareStatement("INSERT INTO " + TABLE + "_batch VALUES (?, ?)")) {
                for (int n = 0; n < 3000; n++) {
                    s.setInt(1, n);
                    s.setString(2, "text " + n);
                    s.addBatch();
                }
                same(Arrays.stream(s.executeBatch()).sum(), 3000);
            }
            same(one(c, "SELECT count(*) FROM " + TABLE + "_batch"), "3000");
            execute(c, "DROP TABLE " + TABLE + "_batch");
            c.commit();
        }
    }

    static void batchError() throws Exception {
        try (Connection c = connect(); Statement s = c.createStatement()) {
            s.addBatch("SELECT 1");
            s.addBatch("SELECT nonsense");
            s.addBatch("SELECT 2");
            try {
                s.executeBatch();
                throw new AssertionError("no error");
            } catch (BatchUpdateException expected) {
                same(one(c, "SELECT 3"), "3");
            }
        }
    }

    static void copyInAndOut() throws Exception {
        try (Connection c = connect()) {
            c.setAutoCommit(false);
            execute(c, "CREATE TABLE " + TABLE + "_jcopy (a int, b text)");
            StringBuilder text = new StringBuilder();
            for (int n = 0; n < 20000; n++) text.append(n).append("\trow ").append(n).append('\n');
            CopyManager copy = c.unwrap(PGConnection.class).getCopyAPI();
            same(copy.copyIn("COPY " + TABLE + "_jcopy FROM STDIN", new StringReader(text.toString())), 20000L);
            StringWriter out = new StringWriter();
            copy.copyOut("COPY (SELECT * FROM " + TABLE + "_jcopy ORDER BY a) TO STDOUT", out);
            same(out.toString().equals(text.toString()), true);
            execute(c, "DROP TABLE " + TABLE + "_jcopy");
            c.commit();
        }
    }

    static void listenNotify() throws Exception {
        try (Connection listener = connect(); Connection sender = connect()) {
            execute(listener, "LISTEN news");
            execute(sender, "SELECT pg_notify('news', 'hello')");
            var notes = listener.unwrap(PGConnection.class).getNotifications(5000);
            same(notes[0].getParameter(), "hello");
        }
    }

    static void cancel() throws Exception {
        try (Connection c = connect(); Statement s = c.createStatement()) {
            Thread canceller = new Thread(() -> {
                try { Thread.sleep(300); s.cancel(); } catch (Exception ignored) { }
            });
            canceller.start();
            fails("57014", () -> s.execute("SELECT pg_sleep(20)"));
            canceller.join();
            same(one(c, "SELECT 1"), "1");
        }
    }

    static void queryTimeout() throws Exception {
        try (Connection c = connect(); Statement s = c.createStatement()) {
            s.setQueryTimeout(1);
            fails("57014", () -> s.execute("SELECT pg_sleep(20)"));
            s.setQueryTimeout(0);
            same(one(c, "SELECT 1"), "1");
        }
    }

    static void errorInTransaction() throws Exception {
        try (Connection c = connect()) {
            c.setAutoCommit(false);
            fails("42703", () -> execute(c, "SELECT nonsense"));
            fails("25P02", () -> execute(c, "SELECT 1"));
            c.rollback();
            Savepoint savepoint = c.setSavepoint();
            fails("22012", () -> execute(c, "SELECT 1/0"));
            c.rollback(savepoint);
            same(one(c, "SELECT 5"), "5");
            c.commit();
        }
    }

    static void largeValues() throws Exception {
        byte[] blob = new byte[LARGE];
        new Random(1).nextBytes(blob);
        try (Connection c = connect(); PreparedStatement s = c.prepareStatement("SELECT ?::bytea, ?::text")) {
            String text = "é".repeat(LARGE / 2);
            s.setBytes(1, blob);
            s.setString(2, text);
            for (int n = 0; n < 2; n++) {
                try (ResultSet r = s.executeQuery()) {
                    r.next();
                    same(Arrays.equals(r.getBytes(1), blob), true);
                    same(r.getString(2).equals(text), true);
                }
            }
        }
    }

    static void manyParameters() throws Exception {
        int count = 30000;
        String rows = String.join(",", Collections.nCopies(count, "(?::int)"));
        try (Connection c = connect(); PreparedStatement s = c.prepareStatement("SELECT count(*) FROM (VALUES " + rows + ") v")) {
            for (int n = 1; n <= count; n++) s.setInt(n, n);
            try (ResultSet r = s.executeQuery()) { r.next(); same(r.getInt(1), count); }
        }
    }

    static void textAndBinary() throws Exception {
        for (String binary : List.of("true", "false")) {
            try (Connection c = connect("binaryTransfer", binary, "prepareThreshold", "-1");
                 PreparedStatement s = c.prepareStatement("SELECT ?::int4, ?::int8, ?::float8, ?::numeric, ?::bool, ?::date")) {
                s.setInt(1, 7);
                s.setLong(2, 1L << 40);
                s.setDouble(3, 1.5);
                s.setBigDecimal(4, new java.math.BigDecimal("123.456"));
                s.setBoolean(5, true);
                s.setObject(6, java.time.LocalDate.of(2024, 2, 29));
                try (ResultSet r = s.executeQuery()) {
                    r.next();
                    same(List.of(r.getInt(1), r.getLong(2), r.getDouble(3), r.getBigDecimal(4), r.getBoolean(5), r.getObject(6, java.time.LocalDate.class)),
                         List.of(7, 1L << 40, 1.5, new java.math.BigDecimal("123.456"), true, java.time.LocalDate.of(2024, 2, 29)));
                }
            }
        }
    }

    static void fetchSize() throws Exception {
        try (Connection c = connect()) {
            c.setAutoCommit(false);
            try (Statement s = c.createStatement()) {
                s.setFetchSize(100);
                long total = 0;
                try (ResultSet r = s.executeQuery("SELECT generate_series(1, 5000)")) { while (r.next()) total += r.getInt(1); }
                same(total, 12502500L);
            }
            c.commit();
        }
    }

    static void notices() throws Exception {
        try (Connection c = connect(); Statement s = c.createStatement()) {
            s.execute("DO $$BEGIN RAISE NOTICE 'one'; RAISE WARNING 'two'; END$$");
            same(s.getWarnings().getMessage(), "one");
            same(s.getWarnings().getNextWarning().getMessage(), "two");
        }
    }

    static void sessionParameters() throws Exception {
        try (Connection one = connect("ApplicationName", "one"); Connection two = connect("ApplicationName", "two")) {
            execute(one, "SET TimeZone = 'Asia/Tokyo'");
            execute(two, "SET TimeZone = 'UTC'");
            String sql = "SELECT current_setting('TimeZone') || ' ' || current_setting('application_name')";
            for (int n = 0; n < 5; n++) {
                same(one(two, sql), "UTC two");
                same(one(one, sql), "Asia/Tokyo one");
            }
        }
    }

    static void metadata() throws Exception {
        try (Connection c = connect(); ResultSet r = c.getMetaData().getTables(null, "pg_catalog", "pg_class", null)) {
            same(r.next(), true);
        }
    }

    public static void main(String[] args) {
        Map<String, Check> checks = new LinkedHashMap<>();
        checks.put("connect-scram", Client::connectScram);
        checks.put("connect-tls-require", Client::connectTlsRequire);
        checks.put("connect-tls-verify-full", Client::connectTlsVerifyFull);
        checks.put("wrong-password", Client::wrongPassword);
        checks.put("simple-mode", Client::simpleMode);
        checks.put("prepared", Client::prepared);
        checks.put("prepared-at-once", Client::preparedAtOnce);
        checks.put("repeated", Client::repeated);
        checks.put("batch", Client::batch);
        checks.put("batch-error", Client::batchError);
        checks.put("copy-in-and-out", Client::copyInAndOut);
        if (!ENV.get("DRIVER_MODE").equals("transaction")) checks.put("listen-notify", Client::listenNotify);
        checks.put("cancel", Client::cancel);
        checks.put("query-timeout", Client::queryTimeout);
        checks.put("error-in-transaction", Client::errorInTransaction);
        checks.put("large-values", Client::largeValues);
        checks.put("many-parameters", Client::manyParameters);
        checks.put("text-and-binary", Client::textAndBinary);
        checks.put("fetch-size", Client::fetchSize);
        checks.put("notices", Client::notices);
        checks.put("session-parameters", Client::sessionParameters);
        checks.put("metadata", Client::metadata);
        String only = ENV.get("DRIVER_ONLY");
        checks.keySet().removeIf(name -> only != null ? !name.equals(only) : name.equals("repeated"));
        checks.forEach((name, check) -> {
            try {
                check.run();
                System.out.println(name + "\tok\t");
            } catch (Throwable error) {
                System.out.println(name + "\tfail\t" + String.valueOf(error).replaceAll("\\s+", " "));
            }
        });
        System.exit(0);
    }
}
