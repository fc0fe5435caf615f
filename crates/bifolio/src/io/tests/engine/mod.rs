//! Tests of the engine: each body over rings, and over threads.

mod drops;
mod faults;
mod filters;
mod threads;
mod transfers;
mod world;
