//! What the examples, tests and benchmarks of `bifolio-object-store` under DataFusion and Ballista
//! share: an S3-compatible server on the loopback, tables in Parquet, and queries.
//!
//! ```text
//! examples/datafusion.rs   one process: DataFusion, the cache, the server
//! examples/ballista.rs     a scheduler and two executors, each with a cache of its own
//! ```

pub mod queries;
#[cfg(feature = "ballista")]
pub mod server;
pub mod tables;
