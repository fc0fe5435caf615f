//! Test support of bifolio: storage that fails, random operations, and a model.
//!
//! | piece | what it is for |
//! |---|---|
//! | [`MemoryBacking`] | storage in memory, strict about alignment when told to be |
//! | [`FaultyBacking`], [`Fault`], [`Gate`] | the n-th call fails, is short, late, or held |
//! | [`filter`] | system calls that fail, by a seccomp filter |
//! | [`block_on`], [`run_all`], [`Woken`] | executors for futures |
//! | [`CrashingBacking`] | forgets at a crash what was not synced, or only some of it |
//! | [`Op`], [`Workload`] | random operations on a file, with weights drawn anew for every run |
//! | [`Model`], [`Runner`] | the same operations on a plain vector, and the comparison |
//! | [`UpsetCase`] | one thread, one file, storage that fails at the n-th call: made of bytes |
//! | [`shrink()`] | fewer operations that fail the same way |
//! | [`SmallDisk`] | a file system that is soon full |
//! | [`PowerDisk`] | a file system of the kernel whose device loses its power |
//! | [`run_and_kill`] | a child that tells of its commits, and is killed |
//! | [`skip()`] | says why a test is skipped; fails where CI demands the feature |
//! | [`attempt`] | runs a command, or skips the test if it fails |
//! | [`with_seeds`] | prints the seed of a failed run; `SEED=...` replays it |
//!
//! Uses only bifolio's public API. It is for integration tests; bifolio's own unit tests use only
//! [`skip()`] and [`filter`], because other types would belong to another copy of the crate.

mod crashing;
mod executor;
mod fault;
mod faulty;
pub mod filter;
mod gate;
mod holes;
mod kill;
#[cfg(feature = "maps")]
mod mapped;
mod memory;
mod model;
mod op;
mod power;
mod run;
mod seed;
mod shrink;
mod skip;
mod small_disk;
mod upset;
mod workload;

pub use crashing::CrashingBacking;
pub use executor::{Woken, block_on, run_all};
pub use fault::{Call, Fault};
pub use faulty::FaultyBacking;
pub use gate::Gate;
pub use kill::{run_and_kill, tell_committed};
pub use memory::MemoryBacking;
pub use model::Model;
pub use op::{Advice, Op, OpKind, fill_bytes};
pub use power::{FileSystem, PowerDisk};
pub use run::{Failure, Runner};
pub use seed::with_seeds;
pub use shrink::shrink;
pub use skip::{attempt, skip};
pub use small_disk::SmallDisk;
pub use upset::{UpsetCase, UpsetStep, UpsetTally};
pub use workload::{Limits, Workload};

/// The programs in the documents are tests, too: here, as a package includes no file of others.
#[cfg(doctest)]
#[doc = include_str!("../../../README.md")]
#[doc = include_str!("../../../docs/guide.md")]
#[doc = include_str!("../../bifolio/README.md")]
struct Documents;
