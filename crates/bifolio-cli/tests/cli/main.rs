//! The program as a user runs it: each subcommand.

mod bench;
mod check;
mod compare;
mod schema;
mod support;
mod top;
