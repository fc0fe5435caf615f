//! The runner over a real cache: it accepts a correct cache and detects a broken one.

use std::sync::Arc;
use std::thread;

use bifolio::backing::Alignment;
use bifolio::{Cache, File, OpenOptions};
use bifolio_testing::{
    Call, Fault, FaultyBacking, Limits, MemoryBacking, Model, Op, OpKind, Runner, Workload,
    fill_bytes, with_seeds,
};

const MEMORY_BYTES: u64 = 4 << 20;

fn cache() -> Cache {
    Cache::builder().memory(MEMORY_BYTES).build().unwrap()
}

fn open(cache: &Cache, backing: Arc<MemoryBacking>) -> File {
    cache.open_backing(backing, &OpenOptions::new().read(true).write(true)).unwrap()
}

fn limits(kinds: &[OpKind]) -> Limits {
    Limits {
        length_bytes_max: 300_000,
        transfer_bytes_max: 100_000,
        folio_bytes: 4096,
        memory_bytes: MEMORY_BYTES / 2..=MEMORY_BYTES,
        kinds: kinds.to_vec(),
    }
}

#[test]
fn a_cache_and_then_its_storage_agree_with_the_model() {
    with_seeds(5, |seed| {
        let start = fill_bytes(seed, 10_000);
        let alignment = Alignment { memory_bytes: 512, offset_bytes: 512 };
        let backing = Arc::new(MemoryBacking::strict(start.clone(), alignment));
        let cache = cache();
        let file = open(&cache, backing.clone());
        let mut runner = Runner::new(&cache, &file, Model::new(start));
        let ops = Workload::new(seed, limits(&OpKind::ANY_FILE)).take(400);
        runner.run(ops).and_then(|()| runner.check_all()).unwrap_or_else(|error| panic!("{error}"));
        let model = runner.into_model();
        file.sync_all().unwrap();
        model.compare(&backing.bytes()).unwrap();
        cache.close().unwrap();
    });
}

#[test]
fn threads_on_neighbouring_parts_do_not_disturb_each_other() {
    // Not a multiple of anything: the regions meet inside a folio.
    const REGION_BYTES: usize = 50_001;
    with_seeds(3, |seed| {
        let backing = Arc::new(MemoryBacking::new(vec![0; 2 * REGION_BYTES]));
        let cache = cache();
        let file = open(&cache, backing.clone());
        let kinds: Vec<_> =
            OpKind::ANY_FILE.into_iter().filter(|kind| *kind != OpKind::SetLen).collect();
        let models = thread::scope(|scope| {
            let run = |number: u64| {
                let start = number * REGION_BYTES as u64;
                let model = Model::region(start, vec![0; REGION_BYTES]);
                let mut runner = Runner::new(&cache, &file, model);
                let ops = Workload::new(seed ^ number, limits(&kinds)).take(300);
                runner.run(ops).and_then(|()| runner.check_all()).unwrap();
                runner.into_model()
            };
            let threads = [0, 1].map(|number| scope.spawn(move || run(number)));
            threads.map(|thread| thread.join().unwrap())
        });
        file.sync_data().unwrap();
        assert_eq!(backing.bytes(), [models[0].bytes(), models[1].bytes()].concat());
    });
}

#[test]
fn a_wrong_byte_is_seen_by_every_way_of_reading() {
    let mut bytes = fill_bytes(1, 20_000);
    let backing = Arc::new(MemoryBacking::new(bytes.clone()));
    bytes[5000] ^= 1;
    let cache = cache();
    let file = open(&cache, backing);
    let mut runner = Runner::new(&cache, &file, Model::new(bytes));
    let (position_bytes, length) = (4990, 20);
    for op in [
        Op::Read { position_bytes, length },
        Op::Pin { position_bytes, length },
        Op::Hold { position_bytes, length },
        Op::PinMut { position_bytes, length, fill: 1 },
    ] {
        let failure = runner.apply(&op).unwrap_err();
        assert!(failure.problem.contains("at position 5000 (page 1, byte 904"), "{failure}");
    }
    assert!(runner.check_all().is_err());
}

#[test]
fn a_wrong_length_is_seen() {
    let backing = Arc::new(MemoryBacking::new(vec![0; 100]));
    let cache = cache();
    let file = open(&cache, backing);
    let mut runner = Runner::new(&cache, &file, Model::new(vec![0; 101]));
    let failure = runner.apply(&Op::SyncData).unwrap_err();
    assert!(failure.to_string().ends_with("the file has 100 bytes instead of 101"), "{failure}");
    let failure = runner.apply(&Op::Read { position_bytes: 90, length: 50 }).unwrap_err();
    assert_eq!(failure.step, 1);
    assert_eq!(failure.problem, "10 bytes instead of 11 at position 90");
}

#[test]
fn an_error_of_the_storage_is_a_failure_with_its_operation() {
    let backing = Arc::new(FaultyBacking::new(MemoryBacking::new(vec![0; 100])));
    let cache = cache();
    let options = OpenOptions::new().read(true).write(true);
    let file = cache.open_backing(backing.clone(), &options).unwrap();
    backing.inject(Fault::on(Call::Read).forever().fails(libc::EIO));
    let mut runner = Runner::new(&cache, &file, Model::new(vec![0; 100]));
    let failure = runner.apply(&Op::Read { position_bytes: 0, length: 10 }).unwrap_err();
    assert!(failure.op.starts_with("Read {"), "{failure}");
    assert!(failure.problem.contains("os error 5"), "{failure}");
    assert!(backing.struck() > 0);
}
