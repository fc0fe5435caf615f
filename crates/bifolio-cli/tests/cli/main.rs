//! The program as a user meets it: each subcommand run for real.

mod bench;
mod check;
mod compare;
mod support;
