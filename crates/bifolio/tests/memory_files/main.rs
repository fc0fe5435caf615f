//! Memory files against models of them: one thread (`model.rs`), several (`regions.rs`,
//! `shared.rs`), and how files and caches end (`lifetimes.rs`); and single
//! promises (`promises.rs`). A [`Setup`](setup::Setup) says in
//! what cache; the same bodies run with a swap and without. What the storage of a swap can do to
//! them is in `swap_faults.rs`.

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
