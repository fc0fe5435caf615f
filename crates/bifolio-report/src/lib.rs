//! The report of a benchmark run: its JSON envelope, and what is drawn from it.
//!
//! A benchmark fills in a [`Report`], the program prints it as a line of JSON, and everything that
//! shows results reads such lines: the summary and the tables of `bifolio bench`, the page of
//! `bench --report` ([`page()`]), the plots of the documentation, [`compare()`] and
//! [`compare_rounds()`]. This crate measures nothing and knows nothing of the cache, so it builds
//! fast.

mod charts;
mod compare;
mod envelope;
mod headline;
mod numbers;
mod page;
mod pictures;
mod plot;
mod rounds;
pub mod statistics;

pub use compare::{Comparison, compare};
pub use envelope::{
    Case, Counts, Failure, FeatureUse, Figure, Host, Intervals, Name, Ratio, Report, Row, Rss,
    SCHEMA, Skipped, with_causes,
};
pub use headline::{BESIDE_THE_KERNEL, Line, MECHANISMS, MISSES, Mechanism, is_cost, speed};
pub use numbers::{short, short_ratio};
pub use page::{names, page};
pub use pictures::pictures;
pub use rounds::{Round, compare_rounds};
