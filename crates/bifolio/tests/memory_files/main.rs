//! Memory files compared with models: one thread (`model.rs`), several (`regions.rs`, `shared.rs`),
//! and how files and caches end (`lifetimes.rs`); single promises (`promises.rs`). A
//! [`Setup`](setup::Setup) describes the cache; the same bodies run with a swap and without. Faults
//! of the storage of a swap are in `swap_faults.rs`, and its limits in `unswapped.rs`.

mod calls;
mod lifetimes;
mod model;
mod promises;
mod regions;
mod setup;
mod shared;
#[path = "../support/mod.rs"]
mod support;
mod swap_faults;
mod unswapped;
