//! Tests of the engine: each body over rings, over rings with nothing registered, and over threads.

mod drops;
mod faults;
mod filters;
mod registered;
mod threads;
mod transfers;
mod world;
