//! The benchmarks behind `bifolio bench`.
//!
//! The program parses a [`Config`], picks a [`Benchmark`] from [`all`], and calls [`run()`], which
//! checks what the benchmark [needs](Needs), creates a [`Workspace`] and passes both as a
//! [`Context`]. The benchmark returns a [`Report`]: the JSON, and what the tables show.
//!
//! To add a benchmark, write a module with a static `Definition` and a function that lists its
//! rows, each with its series; add a line to [`all`].
//!
//! Everything here measures in one run what it compares: repetitions of all series are interleaved,
//! so a machine that changes its speed changes it for every series. Every benchmark verifies the
//! bytes.

mod advise;
mod benchmark;
mod bytes;
mod config;
mod definition;
mod error;
mod gather;
mod harness;
mod hit_ratio;
mod host;
mod map_reads;
mod program;
mod progress;
mod random_reads;
mod reclaim;
mod run;
mod scan;
mod seq_reads;
mod small_reads;
mod summary;
mod table;
mod warm_start;
mod writes;

pub use benchmark::{Benchmark, Context, Needs, all, find, run};
pub use bifolio_report::{Case, Counts, Figure, Host, Intervals, Ratio, Report, Row, Rss, Skipped};
pub use bytes::{format_bytes, parse_bytes};
pub use config::{Config, ParameterSet, Target};
pub use error::{Error, Result};
pub use harness::access::Zipf;
pub use harness::child::run_child;
pub use harness::cleanup::clean_on_signals;
pub use harness::memory_group::{Membership, MemoryGroup};
pub use harness::sizes::Sizes;
pub use harness::workspace::Workspace;
pub use hit_ratio::{HitRatio, Rival};
pub use program::{Lines, deliver};
pub use progress::{Progress, Silent};
pub use run::Given;
pub use summary::summarise;
pub use table::render;
