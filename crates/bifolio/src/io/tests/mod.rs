//! Tests of `io` that need more than one of its files.

mod disk;
mod open;
mod transfer;
mod ways;
