//! The child's side: one open database, and one round of one work at a time.

use std::path::PathBuf;
use std::time::Instant;

use anyhow::{Context, ensure};
use bifolio_bench::{Membership, Zipf};
use fastrand::Rng;
use rusqlite::{CachedStatement, Connection, OpenFlags};
use serde::{Deserialize, Serialize};

use super::data::PAGE_ROWS;
use super::register::register;
use crate::rounds::{RoundCost, cost_of};
use crate::values::{VALUE_BYTES, is_value_of, value};

/// Rows of a range, and changes of a commit.
const RANGE_ROWS: i64 = 100;
const COMMIT_ROWS: u64 = 100;
/// Operations between two looks at the clock.
const BATCH: u64 = 32;
/// The exponent of the law by which skewed points choose pages; that of YCSB.
const SKEW: f64 = 0.99;
/// A prime, larger than the number of pages: spreads the pages that are often chosen.
const MULTIPLIER: u64 = 2_654_435_761;

/// A database to open, and the memory to do it with.
#[derive(Debug, Serialize, Deserialize)]
pub(super) struct Opening {
    pub(super) path: PathBuf,
    pub(super) rows: u64,
    pub(super) storage: Storage,
    /// Size of SQLite's own cache.
    pub(super) sqlite_bytes: u64,
    /// Bound of the cache of the VFS `bifolio`.
    pub(super) cache_bytes: u64,
    /// Largest readahead of that cache.
    pub(super) readahead: Option<String>,
    pub(super) synchronous: String,
    pub(super) group: Option<Membership>,
}

/// The VFS that SQLite reads and writes through.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub(super) enum Storage {
    Bifolio,
    System,
    SystemMapped,
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
}

/// One round.
#[derive(Clone, Copy, Debug, Serialize, Deserialize)]
pub(super) struct Round {
    pub(super) work: Work,
    /// How long it goes on; a commit is finished.
    pub(super) seconds: f64,
    pub(super) seed: u64,
}

/// An open database.
pub(super) struct Session {
    opening: Opening,
    connection: Connection,
    zipf: Zipf,
    changes: u64,
    scan_from: i64,
}

impl Session {
    /// Joins the control group and opens the database.
    pub(super) fn open(opening: Opening) -> anyhow::Result<Self> {
        if let Some(group) = &opening.group {
            group.join()?;
        }
        let mut uri = format!("file:{}", opening.path.display());
        if opening.storage == Storage::Bifolio {
            register()?;
            uri += &format!("?vfs=bifolio&bifolio_memory={}", opening.cache_bytes);
            if let Some(readahead) = &opening.readahead {
                uri += &format!("&bifolio_readahead={readahead}");
            }
        }
        let flags = OpenFlags::SQLITE_OPEN_READ_WRITE | OpenFlags::SQLITE_OPEN_URI;
        let connection = Connection::open_with_flags(uri, flags)?;
        connection.execute_batch(&format!(
            "pragma locking_mode=exclusive; pragma synchronous={}; pragma cache_size=-{}",
            opening.synchronous,
            opening.sqlite_bytes >> 10
        ))?;
        if opening.storage == Storage::SystemMapped {
            connection.execute_batch("pragma mmap_size=2147418112")?;
        }
        let mode: String = connection.query_row("pragma journal_mode", (), |row| row.get(0))?;
        ensure!(mode == "wal", "the journal mode is {mode}");
        let zipf = Zipf::new(opening.rows / PAGE_ROWS, SKEW);
        Ok(Self { opening, connection, zipf, changes: 0, scan_from: 0 })
    }

    /// Runs a round.
    pub(super) fn run_round(&mut self, round: Round) -> anyhow::Result<RoundCost> {
        let mut random = Rng::with_seed(round.seed);
        let rows = self.opening.rows;
        let group = self.opening.group.clone();
        cost_of(round.seconds, group.as_ref(), |until| {
            let operations = match round.work {
                Work::Point => self.points(until, || random.u64(1..=rows))?,
                Work::PointSkewed => {
                    let (zipf, pages) = (self.zipf, rows / PAGE_ROWS);
                    self.points(until, || {
                        let page = zipf.draw(&mut random).wrapping_mul(MULTIPLIER) % pages;
                        page * PAGE_ROWS + random.u64(1..=PAGE_ROWS)
                    })?
                }
                Work::Range => return self.ranges(&mut random, until),
                Work::Scan => self.scan(until)?,
                Work::Update => return Ok((self.update(&mut random, until)?, 0)),
            };
            Ok((operations, operations * VALUE_BYTES as u64))
        })
    }

    fn statement(&self, sql: &str) -> anyhow::Result<CachedStatement<'_>> {
        Ok(self.connection.prepare_cached(sql)?)
    }

    fn points(&self, until: Instant, mut choose: impl FnMut() -> u64) -> anyhow::Result<u64> {
        let mut select = self.statement("select value from rows where id=?1")?;
        let mut operations = 0;
        while Instant::now() < until {
            for _ in 0..BATCH {
                let id = choose();
                let mut found = select.query([id as i64])?;
                let row = found.next()?.with_context(|| format!("no value of {id}"))?;
                check(id, row.get_ref(0)?.as_blob()?)?;
            }
            operations += BATCH;
        }
        Ok(operations)
    }

    /// Ranges that start at a row; those at the end of the table are shorter. Returns the ranges
    /// and the verified bytes.
    fn ranges(&self, random: &mut Rng, until: Instant) -> anyhow::Result<(u64, u64)> {
        let mut select =
            self.statement("select id, value from rows where id>=?1 order by id limit ?2")?;
        let (mut operations, mut rows) = (0, 0);
        while Instant::now() < until {
            let first = random.u64(1..=self.opening.rows);
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
            let transaction = self.connection.transaction()?;
            let mut update = transaction.prepare_cached("update rows set value=?2 where id=?1")?;
            for _ in 0..COMMIT_ROWS {
                let id = random.u64(1..=self.opening.rows);
                self.changes += 1;
                let changed = update.execute((id as i64, value(id, self.changes).as_slice()))?;
                ensure!(changed == 1, "{changed} rows have the id {id}");
            }
            drop(update);
            transaction.commit()?;
            operations += COMMIT_ROWS;
        }
        Ok(operations)
    }
}

fn check(id: u64, found: &[u8]) -> anyhow::Result<()> {
    ensure!(is_value_of(id, found), "a wrong value of {id}");
    Ok(())
}
