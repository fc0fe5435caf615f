//! Works that open databases or connections of their own: imports, indexes, a pool of connections,
//! and many short connections.

use std::path::Path;
use std::time::{Duration, Instant};

use anyhow::ensure;
use fastrand::Rng;
use rusqlite::Connection;

use super::data::{SMALL_BYTES, insert, numbered, rows};
use super::session::{Opening, Round, Work, commit, open_and_close, open_and_read, points};
use crate::rounds::{RoundCost, cost_of};
use crate::values::{VALUE_BYTES, copy};

/// Connections of a pool that read; one more writes.
pub(super) const READERS: u64 = 8;
/// Time from one commit of the pool's writer to the next.
const COMMIT_EVERY: Duration = Duration::from_millis(10);

/// Runs a round.
pub(super) fn run_round(opening: &Opening, round: Round) -> anyhow::Result<RoundCost> {
    let group = opening.group.as_ref();
    match round.work {
        Work::Import => {
            let path = opening.path.with_extension("import");
            remove(&path)?;
            let mut connection = opening.connect(&path)?;
            set_journal(&connection, &opening.journal)?;
            connection
                .execute_batch("create table rows(id integer primary key, value blob not null)")?;
            let cost = cost_of(0.0, group, |_| Ok((import(&mut connection, round.rows)?, 0)))?;
            drop(connection);
            remove(&path)?;
            Ok(cost)
        }
        Work::Index => {
            let path = opening.path.with_extension("index");
            remove(&path)?;
            copy(&opening.path, &path)?;
            let connection = opening.connect(&path)?;
            set_journal(&connection, &opening.journal)?;
            let cost = cost_of(0.0, group, |_| Ok((index(&connection)?, 0)))?;
            drop(connection);
            remove(&path)?;
            Ok(cost)
        }
        Work::Pool => cost_of(round.seconds, group, |until| pool(opening, round, until)),
        _ => cost_of(round.seconds, group, |until| opens(opening, round, until)),
    }
}

fn set_journal(connection: &Connection, mode: &str) -> anyhow::Result<()> {
    let sql = format!("pragma journal_mode={mode}");
    let found: String = connection.query_row(&sql, (), |row| row.get(0))?;
    ensure!(found == mode, "the journal mode is {found}");
    Ok(())
}

/// Removes a database with its log.
fn remove(path: &Path) -> anyhow::Result<()> {
    for end in ["", "-wal", "-shm"] {
        let mut file = path.as_os_str().to_owned();
        file.push(end);
        match std::fs::remove_file(file) {
            Err(error) if error.kind() != std::io::ErrorKind::NotFound => return Err(error.into()),
            _ => {}
        }
    }
    Ok(())
}

/// Inserts rows in one transaction, up to the last byte in the database.
fn import(connection: &mut Connection, rows: u64) -> anyhow::Result<u64> {
    insert(connection, rows)?;
    checkpoint(connection)?;
    Ok(rows)
}

/// Makes an index whose order is not that of the rows.
fn index(connection: &Connection) -> anyhow::Result<u64> {
    connection.execute_batch("create index by_part on rows(substr(value, 9, 8), id)")?;
    checkpoint(connection)?;
    Ok(connection.query_row("select max(id) from rows", (), |row| row.get::<_, i64>(0))? as u64)
}

fn checkpoint(connection: &Connection) -> anyhow::Result<()> {
    let sql = "pragma wal_checkpoint(truncate)";
    let is_busy: i64 = connection.query_row(sql, (), |row| row.get(0))?;
    ensure!(is_busy == 0, "the checkpoint was not completed");
    Ok(())
}

/// Threads with a connection each read random rows, beside one that commits at a fixed rate.
/// Returns the reads and their bytes.
fn pool(opening: &Opening, round: Round, until: Instant) -> anyhow::Result<(u64, u64)> {
    let rows = opening.rows;
    let reads = std::thread::scope(|scope| {
        let reader = |number| {
            move || {
                let connection = opening.connect(&opening.path)?;
                let mut random = Rng::with_seed(round.seed ^ number << 32);
                points(&connection, until, || random.u64(1..=rows))
            }
        };
        let readers: Vec<_> = (0..READERS).map(|number| scope.spawn(reader(number))).collect();
        let writer = scope.spawn(|| -> anyhow::Result<()> {
            let mut connection = opening.connect(&opening.path)?;
            let (mut random, mut changes) = (Rng::with_seed(!round.seed), 0);
            let mut next = Instant::now();
            while next < until {
                commit(&mut connection, rows, &mut changes, &mut random)?;
                next = Instant::now().max(next + COMMIT_EVERY);
                std::thread::sleep(next.saturating_duration_since(Instant::now()));
            }
            Ok(())
        });
        let reads = readers.into_iter().map(|reader| reader.join().expect("no panic"));
        let reads: anyhow::Result<u64> = reads.sum();
        writer.join().expect("no panic")?;
        reads
    })?;
    Ok((reads, reads * VALUE_BYTES as u64))
}

/// Opens small databases in random order, reads a row of each, and closes it. A round that warms up
/// reads all of each first: rows one by one would take longer than the rounds.
fn opens(opening: &Opening, round: Round, until: Instant) -> anyhow::Result<(u64, u64)> {
    if round.warms_up {
        (0..opening.databases)
            .try_for_each(|number| open_and_read(opening, &numbered(&opening.path, number)))?;
    }
    let mut random = Rng::with_seed(round.seed);
    let rows = rows(SMALL_BYTES);
    let mut operations = 0;
    while Instant::now() < until {
        let path = numbered(&opening.path, random.u64(0..opening.databases));
        open_and_close(opening, &path, random.u64(1..=rows))?;
        operations += 1;
    }
    Ok((operations, operations * VALUE_BYTES as u64))
}
