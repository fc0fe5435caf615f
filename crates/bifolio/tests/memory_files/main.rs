//! Memory files against models of them: one thread (`model.rs`), several (`regions.rs`,
//! `shared.rs`), and how files and caches end (`lifetimes.rs`). A [`Setup`](setup::Setup) says in
//! what cache; the same bodies run with a spill and without.

mod lifetimes;
mod model;
mod regions;
mod setup;
mod shared;
#[path = "../support/mod.rs"]
mod support;
