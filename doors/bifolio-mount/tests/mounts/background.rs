//! `--background`: nothing of the caller stays in use.

use std::fs::{self, File};
use std::os::unix::fs::MetadataExt;
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::process::{Command, Stdio};
use std::thread;
use std::time::Duration;

use crate::mounted::{can_mount, have, shell};

/// Returns the process that has locked a source directory.
fn server_of(source: &Path) -> u32 {
    let inode = fs::metadata(source).unwrap().ino();
    let locks = fs::read_to_string("/proc/locks").unwrap();
    let is_ours = |line: &&str| line.contains("FLOCK") && line.contains(&format!(":{inode} "));
    let line = locks.lines().find(is_ours).expect("no process has the lock");
    line.split_whitespace().nth(4).unwrap().parse().unwrap()
}

#[test]
fn callers_that_wait_for_the_end_of_output_return_at_once() {
    if !can_mount() {
        return;
    }
    let directory = tempfile::tempdir().unwrap();
    let path = |name: &str| directory.path().join(name);
    // The output of the script, too, is a pipe whose end is waited for.
    let script = r#"
        cd "$2"
        mkdir source target
        exec 5> lock
        flock 5
        said=$(timeout 60 "$1" --background --memory 1M --log messages source target 2>&1 6>&1)
        echo "<$said>"
        flock -u 5
        exec 5>&-
        flock --nonblock lock true
        echo bytes > target/file
        timeout 60 "$1" --background nowhere target 2>&1 || echo "status $?"
    "#;
    let program = Path::new(env!("CARGO_BIN_EXE_bifolio-mount"));
    let said = shell(script, &[program, directory.path()]);
    assert!(said.starts_with("<>\n") && said.ends_with("status 2\n"), "{said}");
    assert!(said.contains("nowhere: No such file"), "{said}");

    let pid = server_of(&path("source"));
    let of_process = |name: &str| fs::read_link(format!("/proc/{pid}/{name}")).unwrap();
    assert_eq!(of_process("cwd"), Path::new("/"));
    for stream in 0..3 {
        assert_eq!(of_process(&format!("fd/{stream}")), Path::new("/dev/null"));
    }
    let stat = fs::read_to_string(format!("/proc/{pid}/stat")).unwrap();
    let session = stat.rsplit(')').next().unwrap().split_whitespace().nth(3).unwrap();
    assert_eq!(session, pid.to_string());
    let is_ours = |name: &str| name.starts_with(&format!("{pid}-"));
    let socket = fs::read_dir(bifolio_stats::directory()).unwrap().find_map(|entry| {
        let entry = entry.unwrap();
        is_ours(entry.file_name().to_str().unwrap()).then_some(entry.path())
    });
    UnixStream::connect(socket.unwrap()).unwrap();

    // A message of the end.
    let file = File::open(path("target/file")).unwrap();
    shell(r#"kill "$2"; flock "$1" true"#, &[&path("source"), Path::new(&pid.to_string())]);
    drop(file);
    let messages = fs::read_to_string(path("messages")).unwrap();
    assert!(
        messages.contains("target is in use") && messages.contains("bifolio-mount["),
        "{messages}"
    );
    assert_eq!(fs::read_to_string(path("source/file")).unwrap(), "bytes\n");
}

#[test]
fn no_file_takes_the_number_of_a_standard_stream_that_was_closed() {
    if !can_mount() {
        return;
    }
    for options in ["--memory=1M", "--background"] {
        let directory = tempfile::tempdir().unwrap();
        let path = |name: &str| directory.path().join(name);
        // In the foreground, the program ends with the mount.
        let script = r#"
            cd "$2"
            mkdir source target
            "$1" "$3" source target <&- >&- 2>&- &
            program=$!
            for turn in $(seq 600); do mountpoint -q target && break; sleep 0.1; done
            test "$3" != --background || wait "$program"
            exec 5> target/file
            echo bytes >&5
            sync target/file
        "#;
        let program = Path::new(env!("CARGO_BIN_EXE_bifolio-mount"));
        let mut sh = Command::new("sh");
        sh.args(["-euc", &format!("{script} read line"), "sh"]).arg(program);
        sh.arg(directory.path()).arg(options).stdin(Stdio::piped());
        let mut script = sh.spawn().unwrap();
        while fs::metadata(path("source/file")).map_or(0, |status| status.len()) == 0 {
            assert!(script.try_wait().unwrap().is_none(), "{options}: the script has failed");
            thread::sleep(Duration::from_millis(20));
        }
        let pid = server_of(&path("source"));
        let streams = (0..3).map(|number| fs::read_link(format!("/proc/{pid}/fd/{number}")));
        let streams: Vec<_> = streams.map(Result::unwrap).collect();
        drop(script.stdin.take());
        script.wait().unwrap();
        shell(r#"umount "$1"; flock "$2" true"#, &[&path("target"), &path("source")]);
        assert!(streams.iter().all(|to| to == Path::new("/dev/null")), "{options}: {streams:?}");
        assert_eq!(fs::read_to_string(path("source/file")).unwrap(), "bytes\n");
    }
}

#[test]
fn a_mount_by_the_helper_of_mount_has_its_options_and_outlives_a_hang_up() {
    if !can_mount() {
        return;
    }
    let directory = tempfile::tempdir().unwrap();
    let script = r#"
        cd "$2"
        ln -s "$1" mount.fuse.bifolio
        mkdir source target
        echo bytes > source/file
        helper="timeout 60 ./mount.fuse.bifolio"
        $helper source target -o rw,nofail,memory=8M,dirty_age=5s,kernel_cache,x-later
        cat target/file
        echo more > target/new
        # As `mount -o remount,ro target` does.
        $helper source target -o remount,ro 2>&1 || echo "status $?"
    "#;
    let program = Path::new(env!("CARGO_BIN_EXE_bifolio-mount"));
    let said = shell(script, &[program, directory.path()]);
    assert!(said.starts_with("bytes\n") && said.ends_with("status 2\n"), "{said}");
    assert!(said.contains("cannot be changed"), "{said}");
    let pid = server_of(&directory.path().join("source"));
    let script = r#"
        cd "$1"
        kill -HUP "$2"
        sleep 0.2
        cat target/new
        umount target
        timeout 60 flock source true
        timeout 60 ./mount.fuse.bifolio source target -o ro,noexec,nosuid,nodev,user
        ! touch target/file 2>/dev/null
        grep -c "$PWD/target fuse.bifolio ro,nosuid,nodev,noexec," /proc/mounts
        umount target
        timeout 60 flock source true
    "#;
    let pid = pid.to_string();
    assert_eq!(shell(script, &[directory.path(), Path::new(&pid)]), "more\n1\n");
}

/// In a mount namespace of its own, where `/sbin` has the link that `cargo x install` makes.
#[test]
fn mount_finds_the_program_by_the_type_and_by_a_line_of_fstab() {
    if !can_mount() || !have(&["mount", "unshare"]) {
        return;
    }
    let directory = tempfile::tempdir().unwrap();
    let script = r#"
        cd "$2"
        mkdir sbin source target
        ln -s "$1" sbin/mount.fuse.bifolio
        all=$(readlink -f /sbin)
        mount -t overlay none -o "lowerdir=$PWD/sbin:$all" "$all"
        unmount() { umount target; timeout 60 flock source true; }

        mount -t fuse.bifolio -o memory=8M,dirty_age=5s,kernel_cache source target
        grep -c "^$PWD/source $PWD/target fuse.bifolio rw," /proc/mounts
        echo bytes > target/file
        mount -o remount,ro target 2>&1 || echo "status $?"
        echo more >> target/file
        unmount
        echo "$PWD/source $PWD/target fuse.bifolio ro,memory=8M,noauto,nofail,user 0 0" > fstab
        mount --fstab fstab target
        grep -c "^$PWD/source $PWD/target fuse.bifolio ro,nosuid,nodev,noexec," /proc/mounts
        cat target/file
        unmount
    "#;
    let program = Path::new(env!("CARGO_BIN_EXE_bifolio-mount"));
    let said = shell(
        &format!("exec unshare -m sh -euc '{script}' sh \"$@\""),
        &[program, directory.path()],
    );
    let refusal = "bifolio-mount: a mount cannot be changed: umount it, then mount it again with \
                   other options\nstatus 2\n";
    assert_eq!(said, format!("1\n{refusal}1\nbytes\nmore\n"));
}
