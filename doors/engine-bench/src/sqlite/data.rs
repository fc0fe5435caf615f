//! The table that is measured, in the order of its rows.

use std::path::Path;

use rusqlite::Connection;

use crate::values::{forget, value};

/// Rows on a page of 4 KiB.
pub(super) const PAGE_ROWS: u64 = 25;

/// How many rows make a file of this size.
pub(super) fn rows(size_bytes: u64) -> u64 {
    size_bytes / 4096 * PAGE_ROWS
}

/// Makes a database of `rows` rows, with ids from 1 on. Nothing of it stays in the page cache.
pub(super) fn build(path: &Path, rows: u64) -> anyhow::Result<()> {
    let mut connection = Connection::open(path)?;
    connection.execute_batch(
        "pragma page_size=4096; pragma journal_mode=off; pragma synchronous=off;
         create table rows(id integer primary key, value blob not null)",
    )?;
    let transaction = connection.transaction()?;
    let mut insert = transaction.prepare("insert into rows values(?1, ?2)")?;
    for id in 1..=rows {
        insert.execute((id as i64, value(id, 0).as_slice()))?;
    }
    drop(insert);
    transaction.commit()?;
    connection.pragma_update(None, "journal_mode", "wal")?;
    connection.close().map_err(|(_, error)| error)?;
    forget(path)
}
