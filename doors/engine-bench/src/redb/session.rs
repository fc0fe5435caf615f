//! The child's side: one open database, and one round of one work at a time.

use std::path::PathBuf;
use std::time::Instant;

use anyhow::{Context, ensure};
use bifolio::Cache;
use bifolio_bench::Membership;
use bifolio_redb::BifolioBackend;
use fastrand::Rng;
use redb::{Database, ReadableDatabase};
use serde::{Deserialize, Serialize};

use super::data::{TABLE, key};
use crate::rounds::{RoundCost, cost_of};
use crate::values::{VALUE_BYTES, is_value_of, value};

/// Rows of a range, and changes of a commit.
const RANGE_ROWS: usize = 100;
const COMMIT_ROWS: u64 = 100;
/// Operations between two looks at the clock.
const BATCH: u64 = 32;

/// A database to open, and the memory to do it with.
#[derive(Debug, Serialize, Deserialize)]
pub(super) struct Opening {
    pub(super) path: PathBuf,
    pub(super) rows: u64,
    /// Size of redb's own cache.
    pub(super) redb_bytes: usize,
    /// Bound of the cache below it; `None` is redb's file backend.
    pub(super) cache_bytes: Option<u64>,
    /// Largest readahead of that cache.
    pub(super) readahead_bytes: Option<u64>,
    pub(super) group: Option<Membership>,
}

/// Kind of operations that a round measures.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub(super) enum Work {
    Point,
    Range,
    Scan,
    Insert,
    Update,
}

/// One round.
#[derive(Clone, Copy, Debug, Serialize, Deserialize)]
pub(super) struct Round {
    pub(super) work: Work,
    /// How long reads go on.
    pub(super) seconds: f64,
    /// How many commits writes make.
    pub(super) commits: u64,
    pub(super) seed: u64,
}

/// An open database.
pub(super) struct Session {
    opening: Opening,
    database: Database,
    /// Keeps the cache's background threads.
    _cache: Option<Cache>,
    rows: u64,
    changes: u64,
    scan_from: u64,
    verified_bytes: u64,
}

impl Session {
    /// Joins the control group and opens the database.
    pub(super) fn open(opening: Opening) -> anyhow::Result<Self> {
        if let Some(group) = &opening.group {
            group.join()?;
        }
        let mut builder = Database::builder();
        builder.set_cache_size(opening.redb_bytes);
        let (database, cache) = match opening.cache_bytes {
            None => (builder.open(&opening.path)?, None),
            Some(bytes) => {
                let mut cache = Cache::builder().memory(bytes);
                if let Some(bytes) = opening.readahead_bytes {
                    cache = cache.readahead_max(bytes);
                }
                let cache = cache.build()?;
                let backend = BifolioBackend::open(&opening.path, &cache)?;
                (builder.create_with_backend(backend)?, Some(cache))
            }
        };
        let rows = opening.rows;
        let (changes, scan_from, verified_bytes) = (0, 0, 0);
        Ok(Self { opening, database, _cache: cache, rows, changes, scan_from, verified_bytes })
    }

    /// Runs a round.
    pub(super) fn run_round(&mut self, round: Round) -> anyhow::Result<RoundCost> {
        let mut random = Rng::with_seed(round.seed);
        let group = self.opening.group.clone();
        cost_of(round.seconds, group.as_ref(), |until| {
            let operations = match round.work {
                Work::Point => self.points(&mut random, until)?,
                Work::Range => self.ranges(&mut random, until)?,
                Work::Scan => self.scan(until)?,
                Work::Insert | Work::Update => self.write(round, &mut random)?,
            };
            Ok((operations, std::mem::take(&mut self.verified_bytes)))
        })
    }

    fn check(&mut self, key: u64, found: &[u8]) -> anyhow::Result<()> {
        ensure!(is_value_of(key, found), "a wrong value of {key}");
        self.verified_bytes += VALUE_BYTES as u64;
        Ok(())
    }

    fn points(&mut self, random: &mut Rng, until: Instant) -> anyhow::Result<u64> {
        let transaction = self.database.begin_read()?;
        let table = transaction.open_table(TABLE)?;
        let mut operations = 0;
        while Instant::now() < until {
            for _ in 0..BATCH {
                let key = key(random.u64(0..self.rows));
                let found = table.get(key)?.with_context(|| format!("no value of {key}"))?;
                self.check(key, found.value())?;
            }
            operations += BATCH;
        }
        Ok(operations)
    }

    /// Ranges that start at a row; those at the end of the table are shorter.
    fn ranges(&mut self, random: &mut Rng, until: Instant) -> anyhow::Result<u64> {
        let transaction = self.database.begin_read()?;
        let table = transaction.open_table(TABLE)?;
        let mut operations = 0;
        while Instant::now() < until {
            let first = key(random.u64(0..self.rows));
            for entry in table.range(first..)?.take(RANGE_ROWS) {
                let (key, value) = entry?;
                self.check(key.value(), value.value())?;
            }
            operations += 1;
        }
        Ok(operations)
    }

    /// Rows in order, from where the last round stopped; begins again at the end.
    fn scan(&mut self, until: Instant) -> anyhow::Result<u64> {
        let transaction = self.database.begin_read()?;
        let table = transaction.open_table(TABLE)?;
        let mut operations = 0;
        while Instant::now() < until {
            let mut count = 0;
            for entry in table.range(self.scan_from..)? {
                let (key, value) = entry?;
                self.check(key.value(), value.value())?;
                self.scan_from = key.value();
                count += 1;
                if count % (4 * BATCH) == 0 && Instant::now() >= until {
                    break;
                }
            }
            if Instant::now() < until {
                self.scan_from = 0;
            }
            operations += count;
        }
        Ok(operations)
    }

    fn write(&mut self, round: Round, random: &mut Rng) -> anyhow::Result<u64> {
        for _ in 0..round.commits {
            let transaction = self.database.begin_write()?;
            let mut table = transaction.open_table(TABLE)?;
            for _ in 0..COMMIT_ROWS {
                let row = match round.work {
                    Work::Insert => self.rows,
                    _ => random.u64(0..self.rows),
                };
                self.changes += 1;
                let key = key(row);
                table.insert(key, value(key, self.changes).as_slice())?;
                self.rows += u64::from(row == self.rows);
            }
            drop(table);
            transaction.commit()?;
        }
        Ok(round.commits * COMMIT_ROWS)
    }
}
