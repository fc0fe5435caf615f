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
//! # Safety
//! The one unsafe call sets a parameter of the C library's allocator, before there are threads.
#![allow(unsafe_code)]

mod attributes;
mod data;
mod error;
mod inode;
mod read_buffers;
mod server;
mod session;
mod volume;
mod workers;

use std::fmt::Write as _;
use std::io::{BufRead, BufReader, Write};
use std::net::{Ipv4Addr, SocketAddr};
use std::os::unix::process::CommandExt;
use std::path::PathBuf;
use std::process::{Command, ExitCode, Stdio};

use anyhow::{Context, Result, bail, ensure};
use clap::Parser;

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
    /// Keep pages that were read in the kernel's page cache, too, outside of the bound.
    #[arg(long)]
    kernel_cache: bool,
    /// Give other users access. Always so for root; else `/etc/fuse.conf` must allow it.
    #[arg(long)]
    allow_other: bool,
    /// Return when TARGET is mounted, and go on in the background.
    #[arg(long)]
    background: bool,
    /// Serve statistics to Prometheus on an address: a port is one of 127.0.0.1. (`bifolio top
    /// TARGET` needs no address.)
    #[arg(long, value_name = "ADDRESS", value_parser = metrics_address)]
    metrics: Option<SocketAddr>,
    /// Files that stay open in the cache after their last close.
    #[arg(long, hide = true, default_value_t = 4096)]
    kept_files: usize,
}

/// Files could not be written.
const EXIT_NOT_WRITTEN: u8 = 1;
/// The directory could not be mounted.
const EXIT_NOT_MOUNTED: u8 = 2;

/// The line on standard output that says that requests are served.
const MOUNTED: &str = "mounted";

fn main() -> ExitCode {
    let options = Options::parse();
    log::set_logger(&StandardError).map(|()| log::set_max_level(log::LevelFilter::Warn)).ok();
    let result = if options.background { go_to_background() } else { serve(&options) };
    match result {
        Ok(status) => status,
        Err(error) => {
            eprintln!("bifolio-mount: {error:#}");
            ExitCode::from(EXIT_NOT_MOUNTED)
        }
    }
}

/// Mounts, serves requests until the target is unmounted, and writes everything.
fn serve(options: &Options) -> Result<ExitCode> {
    return_freed_buffers();
    let failures = session::run(options, || {
        // The parent process, if it waits, or a script.
        let _ = writeln!(std::io::stdout(), "{MOUNTED}");
    })?;
    for failure in &failures {
        eprintln!("bifolio-mount: not written: {failure}");
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

/// Starts this program again, in a session of its own, and returns when it has mounted.
fn go_to_background() -> Result<ExitCode> {
    let program = std::env::current_exe().context("cannot find this program")?;
    let arguments = std::env::args_os().skip(1).filter(|argument| argument != "--background");
    let mut child = Command::new(program)
        .args(arguments)
        .stdin(Stdio::null())
        .stdout(Stdio::piped())
        // No signal of the terminal, such as that of ctrl-C.
        .process_group(0)
        .spawn()
        .context("cannot start a background process")?;
    let output = child.stdout.take().context("the output of the background process is piped")?;
    let mut line = String::new();
    BufReader::new(output)
        .read_line(&mut line)
        .context("cannot read from the background process")?;
    if line.trim_end() == MOUNTED {
        return Ok(ExitCode::SUCCESS);
    }
    // It has said why.
    let status = child.wait().context("cannot wait for the background process")?;
    let code = status.code().and_then(|code| u8::try_from(code).ok());
    Ok(ExitCode::from(code.unwrap_or(EXIT_NOT_MOUNTED)))
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

/// Parses an address such as 9100 or 192.168.0.1:9100.
fn metrics_address(text: &str) -> Result<SocketAddr> {
    if let Ok(port) = text.parse::<u16>() {
        return Ok((Ipv4Addr::LOCALHOST, port).into());
    }
    text.parse().with_context(|| format!("{text:?} is neither a port nor ADDRESS:PORT"))
}

/// Logs warnings and errors of this program and the cache to standard error.
struct StandardError;

impl log::Log for StandardError {
    fn enabled(&self, metadata: &log::Metadata<'_>) -> bool {
        metadata.level() <= log::Level::Warn && metadata.target().starts_with("bifolio")
    }

    fn log(&self, record: &log::Record<'_>) {
        if self.enabled(record.metadata()) {
            let mut line = String::from("bifolio-mount: ");
            let _ = writeln!(line, "{}", record.args());
            let _ = std::io::stderr().write_all(line.as_bytes());
        }
    }

    fn flush(&self) {}
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
