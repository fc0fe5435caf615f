//! One mount, from its begin to its end: limits, locks, signals, the unmount, and the last sync.
//!
//! ```text
//!   main thread     mounts, then waits for the first of:
//!   session thread    (a) the session ends: the target was unmounted
//!   signal thread     (b) SIGINT or SIGTERM: the target is unmounted, or detached if it is in use
//!                   writes all files, flushes, returns the failures
//! ```

use std::ffi::OsStr;
use std::fs;
use std::net::{SocketAddr, TcpListener};
use std::os::fd::OwnedFd;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::Arc;
use std::sync::mpsc::{self, Sender};
use std::thread;
use std::time::Duration;

use anyhow::{Context, Result, bail, ensure};
use bifolio::{Cache, StatsServer};
use fuser::{Config, MountOption, Session, SessionACL};
use nix::sys::signal::{SigSet, Signal};
use rustix::fs::{FlockOperation, Mode, OFlags, flock, syncfs};
use rustix::io::Errno;
use rustix::mount::{UnmountFlags, unmount};
use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};

use crate::Options;
use crate::data::Files;
use crate::inode::Table;
use crate::server::Server;
use crate::volume::Volume;
use crate::workers::Workers;

/// Time for which programs may go on to use a detached mount.
const DETACHED_MAX: Duration = Duration::from_secs(2);
/// Descriptors of an open file: two of its disk file, one of its inode.
const DESCRIPTORS_PER_FILE: u64 = 3;

/// The end of a mount.
enum End {
    /// The session has ended: the target is not mounted any more.
    Session(std::io::Result<()>),
    /// The target is detached, and programs may still use open files.
    Detached,
}

/// Mounts, calls `mounted`, and serves requests until the target is unmounted. Returns why files
/// could not be written.
pub fn run(options: &Options, mounted: impl FnOnce()) -> Result<Vec<String>> {
    let source = options.source.canonicalize();
    let source = source.with_context(|| format!("{}", options.source.display()))?;
    check_target(&options.target)?;
    let target = options.target.canonicalize();
    let target = target.with_context(|| format!("{}", options.target.display()))?;
    ensure!(
        target == source || !target.starts_with(&source),
        "{} is inside of {}: it would contain itself",
        target.display(),
        source.display()
    );
    let signals = block_signals()?;
    rustix::process::umask(Mode::empty());
    let descriptors = raise_descriptor_limit();

    let root = lock_source(&source)?;
    let cache = Cache::builder().memory(options.memory).build()?;
    // Before the mount, so that an address that is in use is told at once.
    let metrics = options.metrics.map(|address| serve_metrics(&cache, address, &target));
    let _metrics = metrics.transpose()?;
    let _statistics = cache
        .serve_stats(&target.display().to_string())
        .inspect_err(|error| log::warn!("bifolio top cannot show this mount: {error}"));
    let root_path = format!("/proc/self/fd/{}", std::os::fd::AsRawFd::as_raw_fd(&root));
    let handle = rustix::fs::open(root_path, OFlags::PATH | OFlags::CLOEXEC, Mode::empty())?;
    let table = Arc::new(Table::new(handle).map_err(|error| anyhow::anyhow!("{error}"))?);
    let kept_max = options.kept_files.min((descriptors / DESCRIPTORS_PER_FILE / 4) as usize).max(1);
    let files = Files::new(cache, Arc::clone(&table), kept_max);
    let mut volume = Volume::new(table, files, Workers::new(usize::from(options.threads)));
    volume.uses_kernel_cache = options.kernel_cache;
    volume.inodes_max = (descriptors / 3 * 2) as usize;
    let volume = Arc::new(volume);

    let server = Server { volume: Arc::clone(&volume) };
    let session = Session::new(server, &target, &config(options, &source));
    let session = session.with_context(|| {
        let is_root = rustix::process::geteuid().is_root();
        let hint = if is_root { "" } else { " (a user other than root needs fusermount3)" };
        format!("cannot mount on {}{hint}", target.display())
    })?;
    volume.set_notifier(session.notifier());
    let (end, ended) = mpsc::channel();
    let signalled = end.clone();
    let signal_volume = Arc::clone(&volume);
    thread::Builder::new()
        .name("signals".into())
        .spawn(move || serve_signals(&signals, target, &signal_volume, signalled))?;
    let session = thread::Builder::new()
        .name("session".into())
        .spawn(move || drop(end.send(End::Session(session.run()))))?;
    mounted();

    let result = match ended.recv()? {
        End::Detached => match ended.recv_timeout(DETACHED_MAX) {
            Ok(End::Session(result)) => result,
            _ => Ok(()),
        },
        End::Session(result) => result,
    };
    let mut failures = volume.files.write_all();
    failures.extend(flush(&volume, &root));
    if let Err(error) = result {
        log::warn!("the session ended with an error: {error}");
    }
    // A thread that still serves a detached mount ends with the process.
    drop(session);
    Ok(failures)
}

/// Refuses a target that the kernel would accept, or whose refusal would not say what to do.
fn check_target(target: &Path) -> Result<()> {
    match fs::metadata(target) {
        Err(error) if error.raw_os_error() == Some(libc::ENOTCONN) => {
            bail!("{} is a mount whose program was killed: umount it first", target.display())
        }
        Ok(status) if !status.is_dir() => bail!("{} is not a directory", target.display()),
        _ => Ok(()),
    }
}

/// Serves the statistics to Prometheus.
fn serve_metrics(cache: &Cache, address: SocketAddr, target: &Path) -> Result<StatsServer> {
    let server = TcpListener::bind(address)
        .and_then(|listener| cache.serve_stats_on(listener, &target.display().to_string()));
    server.with_context(|| format!("cannot serve metrics on {address}"))
}

/// Blocks the signals that end a mount, in this thread and those that it starts.
fn block_signals() -> Result<SigSet> {
    let mut signals = SigSet::empty();
    [Signal::SIGINT, Signal::SIGTERM, Signal::SIGHUP].into_iter().for_each(|one| signals.add(one));
    let mut blocked = signals;
    // A limit on file sizes is then an error of the write.
    blocked.add(Signal::SIGXFSZ);
    blocked.thread_block().context("cannot block signals")?;
    Ok(signals)
}

/// Raises the limit of open descriptors as far as possible, and returns it. The kernel names an
/// inode for as long as it likes, and each takes a descriptor.
fn raise_descriptor_limit() -> u64 {
    let limit = getrlimit(Resource::Nofile);
    let system = fs::read_to_string("/proc/sys/fs/nr_open").ok();
    let system: Option<u64> = system.and_then(|text| text.trim().parse().ok());
    let ask = |most: Option<u64>| {
        let raised = Rlimit { current: most, maximum: most };
        setrlimit(Resource::Nofile, raised).is_ok().then_some(most).flatten()
    };
    // Only root may exceed the hard limit.
    system
        .filter(|system| limit.maximum.is_none_or(|maximum| maximum < *system))
        .and_then(|system| ask(Some(system)))
        .or_else(|| ask(limit.maximum))
        .or(limit.current)
        .unwrap_or(1024)
}

/// Opens the source directory and locks it against a second mount.
fn lock_source(source: &Path) -> Result<OwnedFd> {
    let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::CLOEXEC;
    let root = rustix::fs::open(source, flags, Mode::empty());
    let root = root.with_context(|| format!("cannot open {}", source.display()))?;
    match flock(&root, FlockOperation::NonBlockingLockExclusive) {
        Ok(()) => Ok(root),
        Err(Errno::WOULDBLOCK) => bail!(
            "{} is mounted already, or still being written after an unmount: another \
             bifolio-mount has locked it",
            source.display()
        ),
        Err(error) => Err(error).with_context(|| format!("cannot lock {}", source.display())),
    }
}

fn config(options: &Options, source: &Path) -> Config {
    // Commas separate mount options.
    let name = source.display().to_string().replace(',', "_");
    let mut config = Config::default();
    config.mount_options = vec![
        MountOption::FSName(name),
        MountOption::Subtype("bifolio".into()),
        MountOption::DefaultPermissions,
        MountOption::NoDev,
        MountOption::NoSuid,
    ];
    let is_for_all_users = options.allow_other || rustix::process::geteuid().is_root();
    config.acl = if is_for_all_users { SessionACL::All } else { SessionACL::Owner };
    config.n_threads = Some(usize::from(options.threads));
    config.clone_fd = true;
    config
}

/// Unmounts at the first signal, and gives up at the second.
fn serve_signals(signals: &SigSet, target: PathBuf, volume: &Volume, end: Sender<End>) {
    if signals.wait().is_err() {
        return;
    }
    // In a thread of its own: to detach a mount waits for its answers.
    let unmounting = move || unmount_or_detach(&target, &end);
    if let Err(error) = thread::Builder::new().name("unmount".into()).spawn(unmounting) {
        log::error!("cannot start a thread that unmounts: {error}");
    }
    if signals.wait().is_ok() {
        for inode in volume.table.all() {
            if inode.is_unwritten() {
                eprintln!("bifolio-mount: perhaps not written: {}", inode.name());
            }
        }
        std::process::exit(i32::from(crate::EXIT_NOT_WRITTEN));
    }
}

/// Unmounts the target, or detaches it if it is in use.
fn unmount_or_detach(target: &Path, end: &Sender<End>) {
    let Err(error) = unmount_by(target, UnmountFlags::empty(), &["-u"]) else { return };
    eprintln!(
        "bifolio-mount: {} is in use ({error}): programs that still use it get errors",
        target.display()
    );
    // What programs have stored to shared maps is in the kernel.
    let root = rustix::fs::open(target, OFlags::RDONLY | OFlags::CLOEXEC, Mode::empty());
    if let Err(error) = root.and_then(|root| syncfs(&root)) {
        log::warn!("cannot write what the kernel has of {}: {error}", target.display());
    }
    if let Err(error) = unmount_by(target, UnmountFlags::DETACH, &["-u", "-z"]) {
        log::error!("cannot detach {}: {error}", target.display());
    }
    let _ = end.send(End::Detached);
}

/// Unmounts as root, or with the help of `fusermount3`.
fn unmount_by(target: &Path, flags: UnmountFlags, arguments: &[&str]) -> Result<()> {
    match unmount(target, flags) {
        Ok(()) => return Ok(()),
        Err(Errno::PERM) => {}
        Err(error) => bail!("{error}"),
    }
    let mut helper = Command::new("fusermount3");
    let output = helper.args(arguments).arg(OsStr::new("--")).arg(target).output();
    let output = output.context("cannot start fusermount3")?;
    ensure!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr).trim());
    Ok(())
}

/// Flushes the devices of all files. Returns the failures.
fn flush(volume: &Volume, root: &OwnedFd) -> Vec<String> {
    let mut failures = Vec::new();
    let mut devices = Vec::new();
    if let Err(error) = syncfs(root) {
        failures.push(format!("the source directory cannot be flushed: {error}"));
    }
    let root_device = rustix::fs::fstat(root).map_or(0, |stat| stat.st_dev);
    for inode in volume.table.all() {
        let device = inode.key.0;
        if device == root_device || devices.contains(&device) || !inode.can_be_opened() {
            continue;
        }
        devices.push(device);
        let descriptor = inode.open(OFlags::RDONLY);
        let flushed = descriptor.and_then(|descriptor| Ok(syncfs(&descriptor)?));
        if let Err(error) = flushed {
            failures
                .push(format!("the file system of {} cannot be flushed: {error}", inode.name()));
        }
    }
    failures
}
