// SPDX-License-Identifier: Apache-2.0
//! Functions of PostgreSQL and its extensions that a read-only transaction may call and that change something all the same.

/// Functions about the server itself, whose processes have other numbers on another server, and whose state is its own.
const ADMINISTRATION: [&str; 13] = [
    "pg_cancel_backend",
    "pg_create_restore_point",
    "pg_log_backend_memory_contexts",
    "pg_promote",
    "pg_reload_conf",
    "pg_rotate_logfile",
    "pg_switch_wal",
    "pg_switch_xlog",
    "pg_terminate_backend",
    "pg_wal_replay_pause",
    "pg_wal_replay_resume",
    "pg_xlog_replay_pause",
    "pg_xlog_replay_resume",
];
/// Functions that change something else.
const WRITES: [&str; 37] = [
    // What dblink runs, it runs in another session, which may write.
    "dblink",
    "dblink_exec",
    "dblink_fetch",
    "dblink_open",
    "dblink_send_query",
    "lo_creat",
    "lo_create",
    "lo_export",
    "lo_from_bytea",
    "lo_import",
    "lo_put",
    "lo_truncate",
    "lo_truncate64",
    "lo_unlink",
    "lowrite",
    "pg_backup_start",
    "pg_backup_stop",
    "pg_copy_logical_replication_slot",
    "pg_copy_physical_replication_slot",
    "pg_create_logical_replication_slot",
    "pg_create_physical_replication_slot",
    "pg_drop_replication_slot",
    "pg_file_rename",
    "pg_file_sync",
    "pg_file_unlink",
    "pg_file_write",
    "pg_logical_emit_message",
    "pg_logical_slot_get_binary_changes",
    "pg_logical_slot_get_changes",
    "pg_notify",
    "pg_replication_origin_advance",
    "pg_replication_origin_create",
    "pg_replication_origin_drop",
    "pg_replication_slot_advance",
    "pg_start_backup",
    "pg_stat_statements_reset",
    "pg_stop_backup",
];

/// Whether a function of this name, in lower case, is about the server itself.
pub fn administers(name: &str) -> bool {
    ADMINISTRATION.contains(&name)
}

/// Whether a function of this name, in lower case, changes something else that a read-only transaction is let change.
pub fn writes(name: &str) -> bool {
    WRITES.contains(&name) || name.starts_with("pg_stat_reset")
}
