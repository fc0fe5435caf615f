//! One mount, from its begin to its end: limits, locks, signals, the unmount, and the last sync.
//!
//! ```text
//!   main thread     mounts, then waits for the first of:
//!   session thread    (a) the session ends: the target was unmounted
//!   signal thread     (b) SIGINT or SIGTERM: the mount is detached, which ends the session
//!                             unless a program uses it
//!                   writes all files, flushes, returns the failures
//! ```

use std::fs;
use std::net::{SocketAddr, TcpListener};
use std::os::fd::{AsRawFd, OwnedFd};
use std::path::Path;
use std::sync::Arc;
use std::sync::mpsc::{self, Receiver, Sender};
use std::thread;
use std::time::Duration;

use anyhow::{Context, Result, bail};
use bifolio::Cache;
use bifolio_stats::StatsServer;
use fuser::{Config, Session, SessionACL};
use nix::sys::signal::{SigSet, Signal};
use rustix::fs::{Mode, OFlags, syncfs};
use rustix::mount::MountFlags;
use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};
use scopeguard::ScopeGuard;

use crate::Options;
use crate::claim::Claim;
use crate::data::Files;
use crate::finalize;
use crate::hot::HotPages;
use crate::inode::Table;
use crate::kernel_pages::{self, KernelPages};
use crate::mount::Mount;
use crate::names::{self, NAME_BYTES};
use crate::server::Server;
use crate::volume::Volume;
use crate::workers::Workers;

/// Time for which programs may go on to use a detached mount.
const DETACHED_MAX: Duration = Duration::from_secs(2);
/// Parts of the limit of descriptors: for inodes that are not open, for files with direct
/// transfers, which take up to two more, and for files that are kept open after their last close.
/// The rest is for files that programs have open.
const DIVISOR_OF_HANDLES: u64 = 16;
const DIVISOR_OF_DIRECT_FILES: u64 = 16;
const DIVISOR_OF_KEPT_FILES: u64 = 12;

/// Part of the memory that names have, from this size on, and their number if it is less.
const DIVISOR_OF_NAMES: u64 = 16;
const NAMES_FROM: u64 = 16 << 20;
const NAMES_MIN: u64 = 1024;

/// Part of the memory that pages have which the kernel keeps of files that are only read, and its
/// least size.
const DIVISOR_OF_KERNEL_PAGES: u64 = 16;
const KERNEL_PAGES_MIN: u64 = 256 << 10;

/// The end of a mount.
enum End {
    /// The session has ended: the target is not mounted any more.
    Session(std::io::Result<()>),
    /// The target is detached, and programs may still use open files.
    Detached,
}

/// Mounts, calls `mounted`, and serves requests until the target is unmounted. Returns why files
/// could not be written.
pub fn run(options: &Options, mounted: impl FnOnce() -> Result<()>) -> Result<Vec<String>> {
    let source = options.source.canonicalize();
    let source = source.with_context(|| format!("{}", options.source.display()))?;
    check_target(&options.target)?;
    let target = options.target.canonicalize();
    let target = target.with_context(|| format!("{}", options.target.display()))?;
    let signals = block_signals(options.background)?;
    rustix::process::umask(Mode::empty());
    let descriptors = raise_descriptor_limit();

    let claim = Claim::new(&source, &target)?;
    let root = &claim.root;
    let (for_names, names_max) = room_for_names(options.memory);
    let pages_max = kernel_pages_max(options);
    let for_pages = if options.memory < NAMES_FROM { 0 } else { pages_max.unwrap_or(0) };
    let builder = Cache::builder().memory(options.memory - for_names - for_pages);
    let cache = builder.dirty_age_max(options.dirty_age).build()?;
    let hot = HotPages::of(options.hot.as_deref(), &cache, &target)?;
    // Before the mount, so that an address that is in use is told at once.
    let metrics = options.metrics.map(|address| serve_metrics(&cache, address, &target));
    let _metrics = metrics.transpose()?;
    let _statistics = serve_statistics(&cache, &target);
    let part = |divisor: u64| (descriptors / divisor).max(1) as usize;
    let table = new_table(root, options, part(DIVISOR_OF_HANDLES))?;
    let kept_max = options.kept_files.min(part(DIVISOR_OF_KEPT_FILES)).max(1);
    let direct_max = part(DIVISOR_OF_DIRECT_FILES);
    let mut files = Files::new(cache, Arc::clone(&table), kept_max, direct_max);
    files.kernel_pages = KernelPages::new(pages_max.unwrap_or(u64::MAX));
    let workers = Workers::new(usize::from(options.threads));
    let mut volume = Volume::new(table, files, workers, names_max);
    volume.is_direct = options.direct;
    let volume = Arc::new(volume);

    let server = Server { volume: Arc::clone(&volume) };
    let is_for_all_users = options.allow_other || rustix::process::geteuid().is_root();
    let (mount, connection) = Mount::new(&source, &target, is_for_all_users, refusals(options))?;
    let of_names = connection.try_clone().context("cannot duplicate a descriptor")?;
    let mount = Arc::new(mount);
    // Until all runs: nothing would serve it.
    let unserved = scopeguard::guard(Arc::clone(&mount), |mount| drop(mount.detach()));
    let acl = if is_for_all_users { SessionACL::All } else { SessionACL::Owner };
    let session = Session::from_fd(server, connection, acl, config(options));
    let session = session.context("the kernel refuses the session")?;
    volume.set_notifier(session.notifier());
    start_housekeeping(&volume, of_names, &target)?;
    let (end, ended) = mpsc::channel();
    let signalled = end.clone();
    let (signal_volume, signal_mount) = (Arc::clone(&volume), Arc::clone(&mount));
    thread::Builder::new()
        .name("signals".into())
        .spawn(move || serve_signals(&signals, signal_mount, &signal_volume, signalled))?;
    let session = thread::Builder::new()
        .name("session".into())
        .spawn(move || drop(end.send(End::Session(session.run()))))?;
    mounted()?;
    ScopeGuard::into_inner(unserved);

    let result = wait(&ended)?;
    drop(hot);
    let mut failures = volume.files.write_all();
    failures.extend(flush(&volume, root));
    if let Err(error) = result {
        log::warn!("the session ended with an error: {error}");
        // Nothing serves it any more.
        let _ = mount.detach();
    }
    // A thread that still serves a detached mount ends with the process.
    drop(session);
    Ok(failures)
}

/// Waits until the session has ended, or programs have used the detached mount for long enough.
fn wait(ended: &Receiver<End>) -> Result<std::io::Result<()>> {
    Ok(match ended.recv()? {
        End::Detached => match ended.recv_timeout(DETACHED_MAX) {
            Ok(End::Session(result)) => result,
            _ => Ok(()),
        },
        End::Session(result) => result,
    })
}

/// Returns what the kernel refuses on the mount.
fn refusals(options: &Options) -> MountFlags {
    let mut flags = MountFlags::empty();
    flags.set(MountFlags::RDONLY, options.read_only);
    flags.set(MountFlags::NOEXEC, options.no_exec);
    flags
}

/// Returns how many bytes the kernel may keep of files that no program has open for writing.
fn kernel_pages_max(options: &Options) -> Option<u64> {
    let is_bounded = !options.direct && !options.kernel_cache;
    is_bounded.then(|| (options.memory / DIVISOR_OF_KERNEL_PAGES).max(KERNEL_PAGES_MIN))
}

/// Starts the threads that set times and have names and pages dropped. `kernel` is the connection.
fn start_housekeeping(volume: &Arc<Volume>, kernel: OwnedFd, target: &Path) -> Result<()> {
    let of_finalizer = Arc::clone(volume);
    thread::Builder::new().name("finalize".into()).spawn(move || finalize::serve(&of_finalizer))?;
    let of_pages = Arc::clone(volume);
    thread::Builder::new().name("pages".into()).spawn(move || kernel_pages::serve(&of_pages))?;
    let of_names = Arc::clone(volume);
    let thread = thread::Builder::new().name("names".into());
    let target = target.to_owned();
    thread.spawn(move || names::serve(&of_names, &kernel, &target))?;
    Ok(())
}

/// Returns how much of the memory names have, and how many they may be.
fn room_for_names(memory: u64) -> (u64, usize) {
    let bytes = if memory < NAMES_FROM { 0 } else { memory / DIVISOR_OF_NAMES };
    (bytes, (bytes / NAME_BYTES).max(NAMES_MIN) as usize)
}

/// Returns the table of inodes, with that of the source directory.
fn new_table(root: &OwnedFd, options: &Options, handles_max: usize) -> Result<Arc<Table>> {
    let path = format!("/proc/self/fd/{}", root.as_raw_fd());
    let handle = rustix::fs::open(path, OFlags::PATH | OFlags::CLOEXEC, Mode::empty())?;
    let table = Table::new(handle, options.dirty_age, handles_max);
    Ok(Arc::new(table.map_err(|error| anyhow::anyhow!("{error}"))?))
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

/// Serves the statistics to `bifolio top`, if it can.
fn serve_statistics(cache: &Cache, target: &Path) -> Option<StatsServer> {
    let server = bifolio_stats::serve(cache, &target.display().to_string());
    server.inspect_err(|error| log::warn!("bifolio top cannot show this mount: {error}")).ok()
}

/// Serves the statistics to Prometheus.
fn serve_metrics(cache: &Cache, address: SocketAddr, target: &Path) -> Result<StatsServer> {
    let server = TcpListener::bind(address).and_then(|listener| {
        bifolio_stats::serve_on(cache, listener, &target.display().to_string())
    });
    server.with_context(|| format!("cannot serve metrics on {address}"))
}

/// Blocks the signals that end a mount, in this thread and those that it starts. To a process in
/// the background, which has no terminal, SIGHUP means nothing.
fn block_signals(is_in_background: bool) -> Result<SigSet> {
    let mut signals = SigSet::empty();
    [Signal::SIGINT, Signal::SIGTERM].into_iter().for_each(|one| signals.add(one));
    let mut blocked = signals;
    blocked.add(Signal::SIGHUP);
    if !is_in_background {
        signals.add(Signal::SIGHUP);
    }
    // A limit on file sizes is then an error of the write.
    blocked.add(Signal::SIGXFSZ);
    blocked.thread_block().context("cannot block signals")?;
    Ok(signals)
}

/// Raises the limit of open descriptors as far as possible, and returns it.
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

/// Returns how the session serves. Who has access is told to the kernel by the mount.
fn config(options: &Options) -> Config {
    let mut config = Config::default();
    config.n_threads = Some(usize::from(options.threads));
    config.clone_fd = true;
    config
}

/// Unmounts at the first signal, and gives up at the second.
fn serve_signals(signals: &SigSet, mount: Arc<Mount>, volume: &Volume, end: Sender<End>) {
    if signals.wait().is_err() {
        return;
    }
    // In a thread of its own: to detach a mount waits for its answers.
    let unmounting = move || detach(&mount, &end);
    if let Err(error) = thread::Builder::new().name("unmount".into()).spawn(unmounting) {
        log::error!("cannot start a thread that unmounts: {error}");
    }
    if signals.wait().is_ok() {
        for inode in volume.table.all() {
            if inode.is_unwritten() {
                log::error!("perhaps not written: {}", inode.name());
            }
        }
        std::process::exit(i32::from(crate::EXIT_NOT_WRITTEN));
    }
}

/// Takes the mount away. Programs that use it keep it for a moment.
fn detach(mount: &Mount, end: &Sender<End>) {
    let target = mount.target.display();
    if let Err(error) = mount.write_and_detach() {
        log::error!("cannot unmount {target}: {error:#}");
    } else if mount.is_alive() {
        log::warn!("{target} is in use: programs that still use it get errors");
    } else {
        // The session ends by itself.
        return;
    }
    let _ = end.send(End::Detached);
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
