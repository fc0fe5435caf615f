//! Tests of `io` that need more than one of its files.

mod disk;
mod engine;
mod open;
mod transfer;
mod ways;
