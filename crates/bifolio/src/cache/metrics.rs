//! Statistics for other programs: as text that Prometheus reads, through a socket that `bifolio
//! top` finds by the number of the process.
//!
//! A [`StatsServer`] is one thread that sleeps until a program connects. It takes a snapshot for
//! each request, so it costs nothing otherwise. It serves one client at a time, and none for longer
//! than [`REQUEST_MAX`].

use super::{Cache, Inner};
use crate::page::PAGE_BYTES;
use crate::stats::{FileStats, Stats};
use crate::sys::descriptor::{above_standard, read_text, with_standard_occupied};
use crate::sys::process::OwnedThread;
use rustix::event::{EventfdFlags, PollFd, PollFlags, eventfd, poll};
use std::fmt::{self, Write as _};
use std::fs::{self, DirBuilder};
use std::io::{self, Read, Write};
use std::net::TcpListener;
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::fs::{DirBuilderExt, MetadataExt};
use std::os::unix::net::UnixListener;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Arc, Weak};
use std::time::{Duration, Instant};

/// Time that a client has for a request.
const REQUEST_MAX: Duration = Duration::from_secs(2);
/// Maximum length of a request, bytes.
const REQUEST_BYTES_MAX: usize = 4096;
/// Files that are listed: those with the most resident bytes.
const FILES_MAX: usize = 256;

/// Distinguishes the servers of a process.
static NUMBERS: AtomicU32 = AtomicU32::new(0);

impl Cache {
    /// Returns the open files: name, length, and bytes in memory. Visits each file; takes some
    /// milliseconds for 100,000. Empty in a forked child.
    pub fn files(&self) -> Vec<FileStats> {
        self.inner.files()
    }

    /// Returns the statistics as text in the format of Prometheus: each counter of [`Stats`] as
    /// `bifolio_NAME_total`, each level as `bifolio_NAME`, and, with labels, those of devices and
    /// of the 256 files with the most bytes in memory. `name` is a label of `bifolio_info`.
    ///
    /// ```
    /// # fn main() -> bifolio::Result<()> {
    /// let cache = bifolio::Cache::builder().memory(16 << 20).build()?;
    /// assert!(cache.stats_text("demo").contains("bifolio_misses_total 0\n"));
    /// # Ok(())
    /// # }
    /// ```
    pub fn stats_text(&self, name: &str) -> String {
        self.inner.stats_text(name)
    }

    /// Serves [`Self::stats_text`] to programs of this user: `bifolio top` shows it by the number
    /// of this process, or by `name`. Ends when the result is dropped.
    ///
    /// The socket is in `/run/bifolio` for root, otherwise in `bifolio` in `$XDG_RUNTIME_DIR`, or
    /// in `/tmp/bifolio-UID`. Other users have no access to it. A thread serves it, and sleeps
    /// while no program asks; it does not keep the cache open.
    ///
    /// # Errors
    /// The directory cannot be created or belongs to another user; no socket or thread.
    ///
    /// ```
    /// # fn main() -> Result<(), Box<dyn std::error::Error>> {
    /// let cache = bifolio::Cache::builder().memory(16 << 20).build()?;
    /// let server = cache.serve_stats("orders")?;
    /// println!("{}", server.address()); // then: bifolio top orders
    /// # Ok(())
    /// # }
    /// ```
    pub fn serve_stats(&self, name: &str) -> io::Result<StatsServer> {
        let directory = stats_directory();
        create_private(&directory)?;
        remove_stale(&directory);
        // Relaxed: only hands out numbers.
        let number = NUMBERS.fetch_add(1, Ordering::Relaxed);
        let path = directory.join(format!("{}-{number}.sock", std::process::id()));
        // Of an earlier process with this number.
        let _ = fs::remove_file(&path);
        let listener = Listener::Local(above_standard(|| UnixListener::bind(&path))?);
        self.start_stats_server(name, listener, path.display().to_string(), Some(path))
    }

    /// Serves [`Self::stats_text`] over HTTP to every program that can connect to `listener`: for
    /// Prometheus. There is no encryption and no password, so bind it to a loopback address.
    /// Otherwise like [`Self::serve_stats`].
    ///
    /// # Errors
    /// No thread; an unusable listener.
    pub fn serve_stats_on(&self, listener: TcpListener, name: &str) -> io::Result<StatsServer> {
        let address = listener.local_addr()?.to_string();
        self.start_stats_server(name, Listener::Network(listener), address, None)
    }

    fn start_stats_server(
        &self,
        name: &str,
        listener: Listener,
        address: String,
        path: Option<PathBuf>,
    ) -> io::Result<StatsServer> {
        listener.set_nonblocking()?;
        let end = Arc::new(above_standard(|| eventfd(0, EventfdFlags::CLOEXEC))?);
        let (cache, name) = (Arc::downgrade(&self.inner), name.to_owned());
        let ended = Arc::clone(&end);
        let run = move || serve(&listener, &ended, &cache, &name);
        let thread = OwnedThread::start("bifolio-stats", run)?;
        Ok(StatsServer { address, path, end, thread })
    }
}

/// Serves the statistics of a cache until it is dropped. See [`Cache::serve_stats`].
#[derive(Debug)]
pub struct StatsServer {
    address: String,
    path: Option<PathBuf>,
    /// Ends the thread, which the drop of `thread` then joins.
    end: Arc<OwnedFd>,
    thread: OwnedThread,
}

impl StatsServer {
    /// Returns the path of the socket, or the network address.
    pub fn address(&self) -> &str {
        &self.address
    }

    /// Returns the directory of the sockets of this user, which exists only if there were any.
    pub fn directory() -> PathBuf {
        stats_directory()
    }
}

impl Drop for StatsServer {
    fn drop(&mut self) {
        if self.thread.is_of_parent() {
            return;
        }
        if let Some(path) = &self.path {
            let _ = fs::remove_file(path);
        }
        // Fails only if the counter is full, and then the thread is awake.
        let _ = rustix::io::write(&*self.end, &1_u64.to_ne_bytes());
    }
}

/// A socket to which clients connect.
#[derive(Debug)]
enum Listener {
    Local(UnixListener),
    Network(TcpListener),
}

/// A connection.
trait Client: Read + Write {}
impl<C: Read + Write> Client for C {}

impl Listener {
    fn set_nonblocking(&self) -> io::Result<()> {
        match self {
            Self::Local(listener) => listener.set_nonblocking(true),
            Self::Network(listener) => listener.set_nonblocking(true),
        }
    }

    /// Accepts a client, whose calls then block for [`REQUEST_MAX`] at the longest.
    fn next_client(&self) -> io::Result<Box<dyn Client>> {
        match self {
            Self::Local(listener) => {
                let client = above_standard(|| listener.accept().map(|accepted| accepted.0))?;
                client.set_nonblocking(false)?;
                client.set_read_timeout(Some(REQUEST_MAX))?;
                client.set_write_timeout(Some(REQUEST_MAX))?;
                Ok(Box::new(client))
            }
            Self::Network(listener) => {
                let client = above_standard(|| listener.accept().map(|accepted| accepted.0))?;
                client.set_nonblocking(false)?;
                client.set_read_timeout(Some(REQUEST_MAX))?;
                client.set_write_timeout(Some(REQUEST_MAX))?;
                Ok(Box::new(client))
            }
        }
    }
}

/// The thread of a server.
fn serve(listener: &Listener, end: &OwnedFd, cache: &Weak<Inner>, name: &str) {
    let listening = match listener {
        Listener::Local(listener) => listener.as_fd(),
        Listener::Network(listener) => listener.as_fd(),
    };
    loop {
        let mut events = [PollFd::new(&listening, PollFlags::IN), PollFd::new(end, PollFlags::IN)];
        let polled = poll(&mut events, None);
        if polled.is_err_and(|error| error != rustix::io::Errno::INTR)
            || !events[1].revents().is_empty()
        {
            return;
        }
        let client = match listener.next_client() {
            Ok(client) => client,
            Err(error) if is_passing(&error) => continue,
            Err(error) => {
                log::warn!("the statistics of {name} are not served any more: {error}");
                return;
            }
        };
        let Some(cache) = cache.upgrade() else { return };
        // A client that goes away, or asks for something else, gets no answer.
        let _ = answer(client, &cache, name);
    }
}

/// Returns `true` if the next client may be accepted in spite of the error. Out of descriptors, the
/// thread would spin if it tried again at once.
fn is_passing(error: &io::Error) -> bool {
    use io::ErrorKind::{ConnectionAborted, Interrupted, WouldBlock};
    let is_short = matches!(error.raw_os_error(), Some(libc::EMFILE | libc::ENFILE | libc::ENOMEM));
    if is_short {
        std::thread::sleep(REQUEST_MAX);
    }
    is_short || matches!(error.kind(), ConnectionAborted | Interrupted | WouldBlock)
}

/// Answers one request.
fn answer(mut client: Box<dyn Client>, cache: &Inner, name: &str) -> io::Result<()> {
    let deadline = Instant::now() + REQUEST_MAX;
    let mut request = Vec::new();
    let mut part = [0; 512];
    while !request.windows(4).any(|bytes| bytes == b"\r\n\r\n") {
        let length = client.read(&mut part)?;
        if length == 0 || request.len() > REQUEST_BYTES_MAX || Instant::now() > deadline {
            return Ok(());
        }
        request.extend_from_slice(&part[..length]);
    }
    let is_known = [&b"GET / "[..], b"GET /metrics ", b"GET /metrics?"]
        .iter()
        .any(|start| request.starts_with(start));
    let (status, text) = match is_known {
        true => ("200 OK", cache.stats_text(name)),
        false => ("404 Not Found", "only /metrics is here\n".to_owned()),
    };
    let head = format!(
        "HTTP/1.0 {status}\r\nContent-Type: text/plain; version=0.0.4; charset=utf-8\r\n\
         Content-Length: {}\r\nConnection: close\r\n\r\n",
        text.len()
    );
    client.write_all(head.as_bytes())?;
    client.write_all(text.as_bytes())
}

fn stats_directory() -> PathBuf {
    let user = rustix::process::geteuid();
    if user.is_root() {
        return "/run/bifolio".into();
    }
    match std::env::var_os("XDG_RUNTIME_DIR") {
        Some(directory) if !directory.is_empty() => Path::new(&directory).join("bifolio"),
        _ => format!("/tmp/bifolio-{}", user.as_raw()).into(),
    }
}

/// Creates a directory to which only this user has access.
fn create_private(directory: &Path) -> io::Result<()> {
    match DirBuilder::new().mode(0o700).create(directory) {
        Err(error) if error.kind() != io::ErrorKind::AlreadyExists => return Err(error),
        _ => {}
    }
    let found = fs::symlink_metadata(directory)?;
    let is_own = found.uid() == rustix::process::geteuid().as_raw();
    if found.is_dir() && is_own && found.mode() & 0o022 == 0 {
        return Ok(());
    }
    let problem =
        format!("{}: not a directory that only this user can change", directory.display());
    Err(io::Error::new(io::ErrorKind::PermissionDenied, problem))
}

/// Removes the sockets of processes that have ended.
fn remove_stale(directory: &Path) {
    let entries = with_standard_occupied(|| fs::read_dir(directory));
    for entry in entries.into_iter().flatten().flatten() {
        let name = entry.file_name();
        let process = name.to_str().and_then(|name| name.split('-').next()?.parse::<u32>().ok());
        if process.is_some_and(|process| !Path::new(&format!("/proc/{process}")).exists()) {
            let _ = fs::remove_file(entry.path());
        }
    }
}

impl Inner {
    fn files(&self) -> Vec<FileStats> {
        if self.registry.cache_state.is_forked() {
            return Vec::new();
        }
        self.registry.file_stats()
    }

    fn stats_text(&self, name: &str) -> String {
        let stats = self.stats();
        let mut text = Text::default();
        let process = std::process::id().to_string();
        text.labelled(
            "bifolio_info",
            "gauge",
            "The cache.",
            [([("name", name), ("pid", &*process)].to_vec(), 1)],
        );
        if let Some(bytes) = resident_bytes() {
            let help = "Resident memory of the process, bytes.";
            text.labelled("process_resident_memory_bytes", "gauge", help, [(Vec::new(), bytes)]);
        }
        let transfers =
            [("ring_enters", stats.ring_enters), ("ring_transfers", stats.ring_transfers)];
        for (name, count) in stats.counts().into_iter().chain(transfers) {
            text.plain(&format!("bifolio_{name}_total"), "counter", count);
        }
        for (name, level) in stats.levels() {
            text.plain(&format!("bifolio_{name}"), "gauge", level);
        }
        self.describe_devices(&stats, &mut text);
        let mut files = self.files();
        files.sort_by_key(|file| std::cmp::Reverse(file.resident_bytes));
        files.truncate(FILES_MAX);
        let of_files = |value: fn(&FileStats) -> u64| {
            files.iter().map(move |file| (vec![("file", &*file.file)], value(file)))
        };
        let resident = of_files(|file| file.resident_bytes);
        text.labelled(
            "bifolio_file_resident_bytes",
            "gauge",
            "Bytes in memory, by file.",
            resident,
        );
        let dirty = of_files(|file| file.dirty_bytes);
        text.labelled("bifolio_file_dirty_bytes", "gauge", "Dirty bytes, by file.", dirty);
        text.0
    }

    fn describe_devices(&self, stats: &Stats, text: &mut Text) {
        let names: Vec<String> = stats
            .devices
            .iter()
            .map(|device| match device.device {
                Some(number) => number.to_string(),
                None => device.first_file.clone(),
            })
            .collect();
        let of_devices = |value: fn(&crate::stats::DeviceStats) -> u64| {
            let devices = stats.devices.iter().zip(&names);
            devices.map(move |(device, name)| {
                (vec![("device", &**name), ("file", &*device.first_file)], value(device))
            })
        };
        let gauge = "gauge";
        text.labelled(
            "bifolio_device_dirty_bytes",
            gauge,
            "Dirty bytes, by device and a file on it.",
            of_devices(|device| device.dirty_bytes),
        );
        text.labelled(
            "bifolio_device_dirty_bytes_max",
            gauge,
            "Upper bound on the dirty bytes.",
            of_devices(|device| device.dirty_bytes_max),
        );
        text.labelled(
            "bifolio_device_stuck",
            gauge,
            "1 if the device refused all last writes.",
            of_devices(|device| device.is_stuck.into()),
        );
    }
}

/// Returns the resident memory of this process.
fn resident_bytes() -> Option<u64> {
    let found = read_text("/proc/self/statm").ok()?;
    Some(found.split(' ').nth(1)?.parse::<u64>().ok()? * PAGE_BYTES)
}

/// Text in the format of Prometheus.
#[derive(Default)]
struct Text(String);

impl Text {
    fn plain(&mut self, name: &str, kind: &str, value: u64) {
        let _ = writeln!(self.0, "# TYPE {name} {kind}\n{name} {value}");
    }

    fn labelled<'l>(
        &mut self,
        name: &str,
        kind: &str,
        help: &str,
        samples: impl IntoIterator<Item = (Vec<(&'l str, &'l str)>, u64)>,
    ) {
        let _ = writeln!(self.0, "# HELP {name} {help}\n# TYPE {name} {kind}");
        for (labels, value) in samples {
            let shown: Vec<String> = labels
                .iter()
                .map(|(label, value)| format!("{label}=\"{}\"", Escaped(value)))
                .collect();
            let labels =
                if shown.is_empty() { String::new() } else { format!("{{{}}}", shown.join(",")) };
            let _ = writeln!(self.0, "{name}{labels} {value}");
        }
    }
}

/// The value of a label.
struct Escaped<'t>(&'t str);

impl fmt::Display for Escaped<'_> {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        for letter in self.0.chars() {
            match letter {
                '\\' => formatter.write_str("\\\\")?,
                '"' => formatter.write_str("\\\"")?,
                '\n' => formatter.write_str("\\n")?,
                other => formatter.write_char(other)?,
            }
        }
        Ok(())
    }
}
