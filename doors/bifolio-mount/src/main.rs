//! The `bifolio-mount` program: a directory, mounted through a cache with a bound on its memory.
//!
//! ```text
//! program --> kernel --> server.rs --> volume.rs --> names, directories, attributes
//!                           |             |              of the source directory
//!                      workers.rs      data.rs ------> bifolio::File: the contents
//! ```
//!
//! Exit status: 0 unmounted, and everything is durable; 1 some files could not be written, each
//! named on standard error; 2 could not mount.
//!
//! # Promises
//!
//! What programs take an `Ok` of a call to mean, and what it means here. *In the cache* is lost if
//! this program is killed, and nothing else; *in the source* is in the kernel, below this program;
//! *durable* is on the device. An error of a later write-out is logged at once, with file and
//! position, and reported to each handle that was open then: by each close, and once by a sync.
//!
//! ```text
//! Ok of                   means                                  no space is said       test
//! write, append,          in the cache, with room for its blocks by the call (room.rs)  F1 F2 F4
//!   copy_file_range       (beside what other programs take)
//! close                   write-out has begun; when space is     if it was not by the   F1 E2
//!                         short: in the source                   write
//! fsync, fdatasync,       durable, with all writes before it;    by the call            K E1
//!   O_SYNC, msync         no earlier one was lost                                       E3
//! rename                  both names, in the source; the file    by the call            N1 E4
//!                         moved was written before
//! fallocate               blocks, in the source                  by the call            F1
//! ftruncate to less       in the source                          -                      C1
//! ftruncate to more       a hole, in the cache                   by writes to it        F3
//! unlink                  no name, in the source; what was not   -                      N2
//!                         written is dropped at the last close
//! chmod, setxattr, ..     in the source                          by the call            X
//! a store to a map        in the kernel's page cache             by msync, fsync, close F1
//!                         (refused later: logged, exit status 1)
//! sync, syncfs            nothing: the kernel does not pass      -                      -
//!                         them on
//! umount                  no new writes; this program ends when  exit status 1, with    E4
//!                         all is durable                         the names of files
//!
//! K  kills.rs: what_fsync_acknowledged_survives_5_kills
//! E  faults.rs: 1 each_open_handle_learns_of_a_passing_error_once, 2 a_close_reports_..,
//!    3 pages_that_a_device_refused_.., 4 a_rename_and_an_unmount_..
//! F  full.rs: 1 what_calls_said_is_there_after_the_unmount_.., 2 writers_of_many_files_..,
//!    3 sparse_files_stay_sparse, 4 what_calls_said_is_there_.._or_a_call_said_quota
//! C  contents.rs: 1 appends_truncates_and_holes_have_the_right_size
//! N  names.rs: 1 a_renamed_file_is_written_first, 2 a_removed_file_is_used_until_it_is_closed
//! X  xattrs.rs
//! ```
//!
//! # Safety
//! The one unsafe call sets a parameter of the C library's allocator, before there are threads.
#![allow(unsafe_code)]

mod attributes;
mod background;
mod claim;
mod data;
mod disk;
mod error;
mod failures;
mod finalize;
mod handle;
mod helper;
mod hot;
mod inode;
mod kernel_pages;
mod messages;
mod mount;
mod names;
mod quota;
mod read_buffers;
mod removed;
mod room;
mod server;
mod session;
mod volume;
mod workers;
mod xattr;

use std::ffi::OsString;
use std::io::Write;
use std::net::{Ipv4Addr, SocketAddr};
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::time::Duration;

use anyhow::{Context, Result, bail, ensure};
use clap::{CommandFactory, Parser};
use clap_complete::{Shell, generate_to};

use crate::background::Process;

/// Mount SOURCE on TARGET, through a cache that takes at most the given memory.
///
/// Ends when TARGET is unmounted, or on ctrl-C. Exit status: 0 everything is written, 1 some files
/// could not be written, 2 could not mount.
#[derive(Debug, Parser)]
#[command(name = "bifolio-mount", version)]
pub struct Options {
    /// The directory whose files are served. No other program should change them meanwhile.
    source: PathBuf,
    /// The directory on which they appear; may be SOURCE itself.
    target: PathBuf,
    /// Bound on the memory of the cache: 4096K, 512M, 2G.
    #[arg(long, value_name = "SIZE", default_value = "512M", value_parser = bytes)]
    memory: u64,
    /// Threads that serve requests.
    #[arg(long, default_value_t = 4, value_parser = clap::value_parser!(u16).range(2..=64))]
    threads: u16,
    /// Let the kernel's page cache keep all pages that it has memory for. By default those of files
    /// that are only read are within the bound.
    #[arg(long, conflicts_with = "direct")]
    kernel_cache: bool,
    /// Serve all files past the kernel's page cache. Shared maps of files are refused (`ENODEV`).
    #[arg(long)]
    direct: bool,
    /// Refuse changes.
    #[arg(long)]
    read_only: bool,
    /// Refuse to run programs.
    #[arg(long)]
    no_exec: bool,
    /// Give other users access. Always so for root; else `/etc/fuse.conf` must allow it.
    #[arg(long)]
    allow_other: bool,
    /// Maximum age of data that only this program has: 200ms, 1s, 1m. A kill of this program loses
    /// what is younger and was not synced by fsync. (Neither sync nor syncfs reaches this program.)
    #[arg(long, value_name = "TIME", default_value = "1s", value_parser = duration)]
    dirty_age: Duration,
    /// Return when TARGET is mounted, and go on in the background. Messages then go to syslog.
    #[arg(long)]
    background: bool,
    /// Append messages to a file.
    #[arg(long, value_name = "FILE")]
    log: Option<PathBuf>,
    /// Serve statistics to Prometheus on an address: a port is one of 127.0.0.1. (`bifolio top
    /// TARGET` needs no address.)
    #[arg(long, value_name = "ADDRESS", value_parser = metrics_address)]
    metrics: Option<SocketAddr>,
    /// Read the pages again that were in memory at the last end, when their files are opened; save
    /// them there at the end, and every minute. FILE is outside of TARGET.
    #[arg(long, value_name = "FILE")]
    hot: Option<PathBuf>,
    /// Files that stay open in the cache after their last close.
    #[arg(long, hide = true, default_value_t = 4096)]
    kept_files: usize,
}

/// Files could not be written.
const EXIT_NOT_WRITTEN: u8 = 1;
/// The directory could not be mounted.
const EXIT_NOT_MOUNTED: u8 = 2;

fn main() -> ExitCode {
    let arguments: Vec<OsString> = std::env::args_os().collect();
    let outcome = match &arguments[..] {
        // For `cargo x install`.
        [_, option, directory] if option == "--generate" => generate(directory.as_ref()),
        [program, arguments @ ..] if helper::is_asked(program) => run_for_mount(arguments),
        _ => run(&Options::parse()),
    };
    match outcome {
        Ok(status) => status,
        Err(error) => {
            messages::report_failure(&error);
            ExitCode::from(EXIT_NOT_MOUNTED)
        }
    }
}

/// Writes the manual page and the completions of three shells.
fn generate(directory: &Path) -> Result<ExitCode> {
    for shell in [Shell::Bash, Shell::Fish, Shell::Zsh] {
        generate_to(shell, &mut Options::command(), "bifolio-mount", directory)?;
    }
    clap_mangen::generate_to(Options::command(), directory)?;
    Ok(ExitCode::SUCCESS)
}

/// Runs as `mount` asks.
fn run_for_mount(arguments: &[OsString]) -> Result<ExitCode> {
    messages::start(None)?;
    helper::options(arguments)?.map_or(Ok(ExitCode::SUCCESS), |options| run(&options))
}

/// Runs in the foreground, or starts the background process.
fn run(options: &Options) -> Result<ExitCode> {
    if !options.background {
        messages::start(options.log.as_deref())?;
        return serve(options, || {
            // For a script that waits for it.
            let _ = writeln!(std::io::stdout(), "mounted");
            Ok(())
        });
    }
    match background::start()? {
        Process::Caller(status) => Ok(status),
        Process::Server(background) => {
            messages::start(options.log.as_deref())?;
            serve(options, || background.release_caller())
        }
    }
}

/// Mounts, serves requests until the target is unmounted, and writes everything.
fn serve(options: &Options, mounted: impl FnOnce() -> Result<()>) -> Result<ExitCode> {
    return_freed_buffers();
    let failures = session::run(options, mounted)?;
    for failure in &failures {
        log::error!("not written: {failure}");
    }
    Ok(if failures.is_empty() { ExitCode::SUCCESS } else { ExitCode::from(EXIT_NOT_WRITTEN) })
}

/// Has the C library return buffers of 128 KiB and more to the kernel when they are freed. By
/// default it soon keeps buffers of 1 MiB, in an arena for each thread that allocates, so that the
/// copies of writes that wait would take a multiple of their bound.
fn return_freed_buffers() {
    #[cfg(target_env = "gnu")]
    // SAFETY: `mallopt` has no demand but that no other thread allocates meanwhile, which holds
    // because `main` has started none.
    let _is_set = unsafe { libc::mallopt(libc::M_MMAP_THRESHOLD, 128 << 10) };
}

/// Parses a size such as 4096, 512K, 512M, 2GiB.
fn bytes(text: &str) -> Result<u64> {
    let digits = text.trim_end_matches(|letter: char| letter.is_ascii_alphabetic());
    let shift = match text[digits.len()..].to_ascii_lowercase().as_str() {
        "" => 0,
        "k" | "kib" => 10,
        "m" | "mib" => 20,
        "g" | "gib" => 30,
        "t" | "tib" => 40,
        unit => bail!("{unit} is no unit: K, M, G and T are"),
    };
    let number: u64 = digits.parse().with_context(|| format!("{digits:?} is no number"))?;
    ensure!(number.leading_zeros() >= shift, "{text} is too much");
    Ok(number << shift)
}

/// Parses a time such as 200ms, 1s, 5 (seconds), 1m.
fn duration(text: &str) -> Result<Duration> {
    let digits = text.trim_end_matches(|letter: char| letter.is_ascii_alphabetic());
    let milliseconds: u64 = match &text[digits.len()..] {
        "ms" => 1,
        "" | "s" => 1000,
        "m" => 60_000,
        unit => bail!("{unit} is no unit: ms, s and m are"),
    };
    let number: u64 = digits.parse().with_context(|| format!("{digits:?} is no number"))?;
    let time = Duration::from_millis(number.saturating_mul(milliseconds));
    let (min, max) = (Duration::from_millis(1), Duration::from_secs(3600));
    ensure!((min..=max).contains(&time), "{text} is not from 1ms to 60m");
    Ok(time)
}

/// Parses an address such as 9100 or 192.168.0.1:9100.
fn metrics_address(text: &str) -> Result<SocketAddr> {
    if let Ok(port) = text.parse::<u16>() {
        return Ok((Ipv4Addr::LOCALHOST, port).into());
    }
    text.parse().with_context(|| format!("{text:?} is neither a port nor ADDRESS:PORT"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_port_alone_is_one_of_the_loopback_address() {
        assert_eq!(metrics_address("9100").unwrap().to_string(), "127.0.0.1:9100");
        assert_eq!(metrics_address("[::1]:9100").unwrap().to_string(), "[::1]:9100");
        assert!(metrics_address("host").is_err());
    }

    #[test]
    fn times_have_units() {
        for (text, expected) in [("1ms", 1), ("5", 5_000), ("2s", 2_000), ("60m", 3_600_000)] {
            assert_eq!(duration(text).unwrap(), Duration::from_millis(expected));
        }
        for wrong in ["", "s", "0", "61m", "1h", "-1s", "99999999999999999999s"] {
            assert!(duration(wrong).is_err(), "{wrong}");
        }
    }

    #[test]
    fn sizes_have_units() {
        for (text, expected) in
            [("4096", 4096), ("64k", 64 << 10), ("1GiB", 1 << 30), ("2T", 2 << 40)]
        {
            assert_eq!(bytes(text).unwrap(), expected);
        }
        for wrong in ["", "M", "1X", "-1", "20000000T"] {
            assert!(bytes(wrong).is_err(), "{wrong}");
        }
    }
}
