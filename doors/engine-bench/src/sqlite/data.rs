//! The table that is measured, in the order of its rows.

use std::fs::File;
use std::path::{Path, PathBuf};

use rusqlite::Connection;

use crate::values::{forget, value};

/// Rows on a page of 4 KiB.
pub(super) const PAGE_ROWS: u64 = 25;

/// Size of each of many small databases.
pub(super) const SMALL_BYTES: u64 = 1 << 20;

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
    insert(&mut connection, rows)?;
    connection.pragma_update(None, "journal_mode", "wal")?;
    connection.close().map_err(|(_, error)| error)?;
    forget(path)
}

/// Inserts the rows with the ids up to `rows` in one transaction.
pub(super) fn insert(connection: &mut Connection, rows: u64) -> anyhow::Result<()> {
    let transaction = connection.transaction()?;
    let mut insert = transaction.prepare("insert into rows values(?1, ?2)")?;
    for id in 1..=rows {
        insert.execute((id as i64, value(id, 0).as_slice()))?;
    }
    drop(insert);
    transaction.commit()?;
    Ok(())
}

/// Path of one of the small databases that belong to the one at `path`.
pub(super) fn numbered(path: &Path, number: u64) -> PathBuf {
    path.with_extension(format!("{number}.small"))
}

/// Makes `count` small databases for each of `paths`.
pub(super) fn build_small(paths: &[PathBuf], count: u64) -> anyhow::Result<()> {
    let first = numbered(&paths[0], 0);
    build(&first, rows(SMALL_BYTES))?;
    let all = paths.iter().flat_map(|path| (0..count).map(move |number| numbered(path, number)));
    let copies: Vec<PathBuf> = all.skip(1).collect();
    for path in &copies {
        std::fs::copy(&first, path)?;
    }
    // One flush for all; then those of each have nothing to do.
    rustix::fs::syncfs(File::open(&first)?)?;
    copies.iter().try_for_each(|path| forget(path))
}

/// Removes the small databases.
pub(super) fn remove_small(paths: &[PathBuf], count: u64) -> std::io::Result<()> {
    let each = |path| (0..count).map(move |number| numbered(path, number));
    paths.iter().flat_map(|path| each(path)).try_for_each(std::fs::remove_file)
}
