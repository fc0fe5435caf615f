//! The child's side: the opening of databases, and one round of one work at a time. The works of
//! one table are here, those with databases or connections of their own in `own.rs`.

use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use anyhow::{Context, ensure};
use bifolio_bench::Membership;
use fastrand::Rng;
use rusqlite::{CachedStatement, Connection, OpenFlags, TransactionBehavior};
use serde::{Deserialize, Serialize};

use super::data::PAGE_ROWS;
use super::own;
use super::register::register;
use crate::rounds::{RoundCost, cost_of};
use crate::skewed::SkewedPages;
use crate::values::{VALUE_BYTES, is_value_of, value};

/// Rows of a range, and changes of a commit.
const RANGE_ROWS: i64 = 100;
const COMMIT_ROWS: u64 = 100;
const SELECT: &str = "select value from rows where id=?1";
/// Operations between two looks at the clock.
const BATCH: u64 = 32;

/// A database to open, and the memory to do it with.
#[derive(Debug, Serialize, Deserialize)]
pub(super) struct Opening {
    pub(super) path: PathBuf,
    pub(super) rows: u64,
    /// Small databases beside it.
    pub(super) databases: u64,
    pub(super) storage: Storage,
    /// Size of SQLite's own cache.
    pub(super) sqlite_bytes: u64,
    /// Bound of the cache of the VFS `bifolio`, of all databases.
    pub(super) cache_bytes: u64,
    /// Largest readahead of that cache.
    pub(super) readahead: Option<String>,
    pub(super) synchronous: String,
    /// Journal mode of imports and indexes.
    pub(super) journal: String,
    pub(super) group: Option<Membership>,
}

/// The VFS that SQLite reads and writes through.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub(super) enum Storage {
    Bifolio,
    BifolioExclusive,
    System,
    SystemMapped,
}

impl Storage {
    fn is_bifolio(self) -> bool {
        matches!(self, Self::Bifolio | Self::BifolioExclusive)
    }
}

/// Kind of operations that a round measures.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub(super) enum Work {
    Point,
    PointSkewed,
    Range,
    Scan,
    Update,
    Import,
    Index,
    Pool,
    Open,
}

impl Work {
    /// Returns `true` if the work opens databases or connections of its own, in a process of its
    /// own.
    pub(super) fn is_own(self) -> bool {
        matches!(self, Self::Import | Self::Index | Self::Pool | Self::Open)
    }
}

/// One round.
#[derive(Clone, Copy, Debug, Serialize, Deserialize)]
pub(super) struct Round {
    pub(super) work: Work,
    /// How long it goes on; a commit is finished, and an import or an index has no limit.
    pub(super) seconds: f64,
    /// It is not measured, and leaves everything as warm as it gets.
    pub(super) warms_up: bool,
    /// Rows of an import.
    pub(super) rows: u64,
    pub(super) seed: u64,
}

impl Opening {
    /// Opens a database of this series.
    pub(super) fn connect(&self, path: &Path) -> anyhow::Result<Connection> {
        let mut uri = format!("file:{}", path.display());
        if self.storage.is_bifolio() {
            let is_exclusive = self.storage == Storage::BifolioExclusive;
            uri += &format!("?vfs=bifolio&bifolio_exclusive={}", i32::from(is_exclusive));
            if let Some(readahead) = &self.readahead {
                let bytes = self.cache_bytes;
                uri += &format!("&bifolio_memory={bytes}&bifolio_readahead={readahead}");
            }
        }
        let flags = OpenFlags::SQLITE_OPEN_READ_WRITE
            | OpenFlags::SQLITE_OPEN_CREATE
            | OpenFlags::SQLITE_OPEN_URI
            | OpenFlags::SQLITE_OPEN_NO_MUTEX;
        let connection = Connection::open_with_flags(uri, flags)?;
        connection.busy_timeout(Duration::from_secs(60))?;
        if self.storage == Storage::SystemMapped {
            connection.execute_batch("pragma mmap_size=2147418112")?;
        }
        connection.execute_batch(&format!(
            "pragma synchronous={}; pragma cache_size=-{}",
            self.synchronous,
            self.sqlite_bytes >> 10
        ))?;
        Ok(connection)
    }
}

/// The databases of a series.
pub(super) struct Session {
    opening: Opening,
    /// Set by the first work of a table.
    table: Option<Table>,
    /// Connection that keeps the database open between the rounds of a pool: the cache of the VFS
    /// drops the pages of a database when its last connection is closed.
    idle: Option<Connection>,
}

/// A table that is open for one work after the other.
struct Table {
    connection: Connection,
    rows: u64,
    skewed: SkewedPages,
    changes: u64,
    scan_from: i64,
}

impl Session {
    /// Joins the control group.
    pub(super) fn open(opening: Opening) -> anyhow::Result<Self> {
        if let Some(group) = &opening.group {
            group.join()?;
        }
        if opening.storage.is_bifolio() {
            register()?;
        }
        Ok(Self { opening, table: None, idle: None })
    }

    /// Runs a round.
    pub(super) fn run_round(&mut self, round: Round) -> anyhow::Result<RoundCost> {
        if round.work == Work::Pool && self.idle.is_none() {
            let idle = self.opening.connect(&self.opening.path)?;
            idle.query_row("select count(*) from sqlite_schema", (), |_| Ok(()))?;
            self.idle = Some(idle);
        }
        if round.work.is_own() {
            return own::run_round(&self.opening, round);
        }
        let table = match &mut self.table {
            Some(table) => table,
            none => none.insert(Table::open(&self.opening)?),
        };
        let group = self.opening.group.as_ref();
        cost_of(round.seconds, group, |until| table.run(round, until))
    }
}

impl Table {
    fn open(opening: &Opening) -> anyhow::Result<Self> {
        let connection = opening.connect(&opening.path)?;
        connection.execute_batch("pragma locking_mode=exclusive")?;
        let mode: String = connection.query_row("pragma journal_mode", (), |row| row.get(0))?;
        ensure!(mode == "wal", "the journal mode is {mode}");
        let (rows, skewed) = (opening.rows, SkewedPages::new(opening.rows / PAGE_ROWS));
        Ok(Self { connection, rows, skewed, changes: 0, scan_from: 0 })
    }

    /// Returns operations and verified bytes.
    fn run(&mut self, round: Round, until: Instant) -> anyhow::Result<(u64, u64)> {
        let mut random = Rng::with_seed(round.seed);
        let rows = self.rows;
        let operations = match round.work {
            Work::PointSkewed => {
                let skewed = self.skewed;
                self.points(until, || {
                    skewed.draw(&mut random) * PAGE_ROWS + random.u64(1..=PAGE_ROWS)
                })?
            }
            Work::Range => return self.ranges(&mut random, until),
            Work::Scan => self.scan(until)?,
            Work::Update => return Ok((self.update(&mut random, until)?, 0)),
            _ => self.points(until, || random.u64(1..=rows))?,
        };
        Ok((operations, operations * VALUE_BYTES as u64))
    }

    fn statement(&self, sql: &str) -> anyhow::Result<CachedStatement<'_>> {
        Ok(self.connection.prepare_cached(sql)?)
    }

    fn points(&self, until: Instant, choose: impl FnMut() -> u64) -> anyhow::Result<u64> {
        points(&self.connection, until, choose)
    }

    /// Ranges that start at a row; those at the end of the table are shorter. Returns the ranges
    /// and the verified bytes.
    fn ranges(&self, random: &mut Rng, until: Instant) -> anyhow::Result<(u64, u64)> {
        let mut select =
            self.statement("select id, value from rows where id>=?1 order by id limit ?2")?;
        let (mut operations, mut rows) = (0, 0);
        while Instant::now() < until {
            let first = random.u64(1..=self.rows);
            let mut found = select.query([first as i64, RANGE_ROWS])?;
            while let Some(row) = found.next()? {
                check(row.get::<_, i64>(0)? as u64, row.get_ref(1)?.as_blob()?)?;
                rows += 1;
            }
            operations += 1;
        }
        Ok((operations, rows * VALUE_BYTES as u64))
    }

    /// Rows in order, from where the last round stopped; begins again at the end.
    fn scan(&mut self, until: Instant) -> anyhow::Result<u64> {
        let mut operations = 0;
        let mut scan_from = self.scan_from;
        let mut select = self.statement("select id, value from rows where id>?1 order by id")?;
        while Instant::now() < until {
            let mut found = select.query([scan_from])?;
            scan_from = 0;
            while let Some(row) = found.next()? {
                let id: i64 = row.get(0)?;
                check(id as u64, row.get_ref(1)?.as_blob()?)?;
                operations += 1;
                if operations % (4 * BATCH) == 0 && Instant::now() >= until {
                    scan_from = id;
                    break;
                }
            }
        }
        drop(select);
        self.scan_from = scan_from;
        Ok(operations)
    }

    fn update(&mut self, random: &mut Rng, until: Instant) -> anyhow::Result<u64> {
        let mut operations = 0;
        while Instant::now() < until {
            operations += commit(&mut self.connection, self.rows, &mut self.changes, random)?;
        }
        Ok(operations)
    }
}

/// Reads rows that `choose` returns the ids of.
pub(super) fn points(
    connection: &Connection,
    until: Instant,
    mut choose: impl FnMut() -> u64,
) -> anyhow::Result<u64> {
    let mut select = connection.prepare_cached(SELECT)?;
    let mut operations = 0;
    while Instant::now() < until {
        for _ in 0..BATCH {
            point(&mut select, choose())?;
        }
        operations += BATCH;
    }
    Ok(operations)
}

fn point(select: &mut CachedStatement<'_>, id: u64) -> anyhow::Result<()> {
    let mut found = select.query([id as i64])?;
    let row = found.next()?.with_context(|| format!("no value of {id}"))?;
    check(id, row.get_ref(0)?.as_blob()?)
}

/// Opens a database, reads a row, and closes it.
pub(super) fn open_and_close(opening: &Opening, path: &Path, id: u64) -> anyhow::Result<()> {
    let connection = opening.connect(path)?;
    point(&mut connection.prepare_cached(SELECT)?, id)
}

/// Opens a database, reads all of it, and closes it.
pub(super) fn open_and_read(opening: &Opening, path: &Path) -> anyhow::Result<()> {
    let connection = opening.connect(path)?;
    let mut select = connection.prepare("select value from rows order by id")?;
    let mut found = select.query([])?;
    while found.next()?.is_some() {}
    Ok(())
}

/// Changes some rows in one commit. Returns their number.
pub(super) fn commit(
    connection: &mut Connection,
    rows: u64,
    changes: &mut u64,
    random: &mut Rng,
) -> anyhow::Result<u64> {
    let transaction = connection.transaction_with_behavior(TransactionBehavior::Immediate)?;
    let mut update = transaction.prepare_cached("update rows set value=?2 where id=?1")?;
    for _ in 0..COMMIT_ROWS {
        let id = random.u64(1..=rows);
        *changes += 1;
        let changed = update.execute((id as i64, value(id, *changes).as_slice()))?;
        ensure!(changed == 1, "{changed} rows have the id {id}");
    }
    drop(update);
    transaction.commit()?;
    Ok(COMMIT_ROWS)
}

fn check(id: u64, found: &[u8]) -> anyhow::Result<()> {
    ensure!(is_value_of(id, found), "a wrong value of {id}");
    Ok(())
}
