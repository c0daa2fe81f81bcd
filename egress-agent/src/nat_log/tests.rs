use std::collections::BTreeSet;

use egress_common::abi::{Addr, BlockOwner, PortBlock};

use super::history::{History, Span};
use super::*;

const ADDRESS: &str = "172.18.0.100";
const POD: &str = "10.244.1.10";
const REMOTE: &str = "10.244.2.10";

fn ip(text: &str) -> IpAddr {
    text.parse().expect("a literal")
}

fn at(seconds: i64) -> Timestamp {
    Timestamp::from_second(1_800_000_000 + seconds).expect("a time")
}

/// A block that was given so many seconds after the beginning, as it is at another time.
fn block(first: u16, pod: &str, source: &str, given: u64, now: u64) -> GivenBlock {
    let block = PortBlock::new(Addr::from(ip(ADDRESS)), first);
    let mut owner =
        BlockOwner::new(Addr::from(ip(pod)), Addr::from(ip(source)), 7, 64, given.saturating_mul(1_000_000_000) + 1);
    owner.seal(&block);
    GivenBlock { block, owner, age: Duration::from_secs(now - given) }
}

fn here(first: u16, given: u64, now: u64) -> GivenBlock {
    block(first, POD, "::", given, now)
}

fn remote(first: u16, given: u64, now: u64) -> GivenBlock {
    block(first, REMOTE, "172.18.0.3", given, now)
}

fn names(pods: &[(&str, &str)]) -> Names {
    Names {
        node: Some("node1".to_owned()),
        pods: pods.iter().map(|(address, pod)| (ip(address), (*pod).to_owned())).collect(),
        objects: [(7, "prod".to_owned())].into(),
        nodes: [(ip("172.18.0.3"), "node2".to_owned())].into(),
        ..Names::default()
    }
}

/// An empty folder of this test, removed with it.
struct TestFolder(PathBuf);

impl TestFolder {
    fn new(name: &str) -> Self {
        let path = std::env::temp_dir().join(format!("egress-agent-nat-log-{name}-{}", std::process::id()));
        std::fs::create_dir(&path).expect("a folder");
        Self(path)
    }
}

impl Drop for TestFolder {
    fn drop(&mut self) {
        let _left = std::fs::remove_dir_all(&self.0);
    }
}

fn settings(folder: &std::path::Path, size: u64) -> NatLogSettings {
    NatLogSettings { path: folder.join("nat.log"), size, kept: 2 }
}

fn writer(settings: NatLogSettings) -> Writer {
    Writer { file: LogFile::new(settings), recorder: NatRecorder::default(), has_begun: false }
}

fn history(settings: &NatLogSettings) -> History {
    let mut history = History::default();
    assert_eq!(file::read(&settings.path, |record| history.add(record)).expect("read the log"), 0);
    history
}

fn span(from: i64, to: Option<i64>) -> Span {
    Span { from: at(from), to: to.map(at) }
}

#[test]
fn blocks_and_pods_are_written_once_and_their_ends_too() {
    let folder = TestFolder::new("once");
    let settings = settings(&folder.0, 1 << 20);
    let mut writer = writer(settings.clone());
    let own = names(&[(POD, "red/one")]);
    writer.write(at(10), &[here(1024, 4, 10)], &own).expect("written");
    writer.write(at(11), &[here(1024, 4, 11)], &own).expect("written");
    let both = [here(1024, 4, 20), remote(2048, 20, 20)];
    writer.write(at(20), &both, &own).expect("written");
    writer.write(at(30), &[remote(2048, 20, 30)], &names(&[])).expect("written");
    let text = std::fs::read_to_string(&settings.path).expect("read the log");
    let events: Vec<serde_json::Value> =
        text.lines().map(|line| serde_json::from_str(line).expect("each line is JSON")).collect();
    let kinds: Vec<_> = events.iter().map(|event| event["event"].as_str().expect("an event")).collect();
    assert_eq!(kinds, ["started", "pod_has", "given", "given", "pod_had_no_more", "taken_back"]);
    assert_eq!(events[2]["time"], at(4).to_string(), "when it was given, and not when it was seen");
    assert_eq!(events[2]["object"], "prod");
    assert_eq!((&events[3]["pod_node"], &events[3]["node"]), (&"node2".into(), &"node1".into()));
    let history = history(&settings);
    let spans: Vec<Span> = history.blocks.iter().map(|block| block.span).collect();
    assert_eq!(spans, [span(4, Some(30)), span(20, None)]);
    assert_eq!(history.pods.iter().map(|pod| pod.span).collect::<Vec<_>>(), [span(10, Some(30))]);
    assert_eq!(history.pod_at(ip(POD), at(25)).map(|pod| pod.pod.as_str()), Some("red/one"));
    assert!(history.pod_at(ip(POD), at(32)).is_none());
    for (time, is_there) in [(2, false), (3, true), (31, true), (32, false)] {
        assert_eq!(history.blocks[0].span.contains(at(time)), is_there, "{time}");
    }
    assert!(history.pod_at(ip(POD), at(4)).is_some(), "its address is seen some seconds later");
}

/// A block that goes to another pod between two looks: the spans do not overlap.
#[test]
fn a_block_that_changes_its_pod_between_two_looks_has_two_spans() {
    let folder = TestFolder::new("changes");
    let settings = settings(&folder.0, 1 << 20);
    let mut writer = writer(settings.clone());
    writer.write(at(10), &[here(1024, 4, 10)], &names(&[])).expect("written");
    writer.write(at(200), &[remote(1024, 190, 200)], &names(&[])).expect("written");
    let spans: Vec<(IpAddr, Span)> =
        history(&settings).blocks.iter().map(|block| (block.block.pod_ip, block.span)).collect();
    assert_eq!(spans, [(ip(POD), span(4, Some(190))), (ip(REMOTE), span(190, None))]);
}

/// The kernel keeps the blocks while there is no agent; a reboot of the node ends them.
#[test]
fn a_restart_continues_what_goes_on_and_ends_what_does_not() {
    let folder = TestFolder::new("restart");
    let settings = settings(&folder.0, 1 << 20);
    let own = names(&[(POD, "red/one")]);
    writer(settings.clone()).write(at(10), &[here(1024, 4, 10), remote(2048, 5, 10)], &own).expect("written");
    // Meanwhile another block was given.
    let now = [here(1024, 4, 100), remote(4096, 50, 100)];
    writer(settings.clone()).write(at(100), &now, &own).expect("written");
    let history = history(&settings);
    let spans: BTreeSet<(u16, Span)> =
        history.blocks.iter().map(|block| (block.block.first_port, block.span)).collect();
    assert_eq!(spans, BTreeSet::from([(1024, span(4, None)), (2048, span(5, Some(100))), (4096, span(50, None))]));
    assert_eq!(history.pods.len(), 1, "{:?}", history.pods);
    assert_eq!(history.pods[0].span, span(10, None));
}

#[test]
fn a_full_file_is_followed_by_one_with_all_that_goes_on() {
    let folder = TestFolder::new("full");
    let settings = settings(&folder.0, 2_000);
    let mut writer = writer(settings.clone());
    let lasting = |now| here(1024, 1, now);
    for second in 10..60 {
        let brief = remote(2048, second, second);
        writer.write(at(i64::try_from(second).expect("few")), &[lasting(second), brief], &names(&[])).expect("written");
    }
    let files: BTreeSet<String> = std::fs::read_dir(&folder.0)
        .expect("the folder")
        .map(|entry| entry.expect("a file").file_name().into_string().expect("text"))
        .collect();
    assert_eq!(files, ["nat.log", "nat.log.1", "nat.log.2"].map(str::to_owned).into(), "the oldest are gone");
    let history = history(&settings);
    let lasting: Vec<Span> =
        history.blocks.iter().filter(|block| block.block.first_port == 1024).map(|block| block.span).collect();
    assert_eq!(lasting, [span(1, None)], "one block, whose beginning is known");
    let brief = history.blocks.iter().filter(|block| block.block.first_port == 2048);
    assert!(brief.clone().count() > 5);
    assert_eq!(brief.filter(|block| block.span.to.is_none()).count(), 1, "the last one");
}

#[test]
fn a_file_that_was_moved_away_is_begun_again_with_all_that_goes_on() {
    let folder = TestFolder::new("moved");
    let settings = settings(&folder.0, 1 << 20);
    let mut writer = writer(settings.clone());
    writer.write(at(10), &[here(1024, 4, 10)], &names(&[])).expect("written");
    std::fs::rename(&settings.path, folder.0.join("away")).expect("move it");
    writer.write(at(15), &[here(1024, 4, 15)], &names(&[])).expect("written");
    assert_eq!(history(&settings).blocks[0].span, span(4, None));
}

#[test]
fn what_cannot_be_written_is_written_later() {
    let folder = TestFolder::new("later");
    let below = folder.0.join("not-there-yet");
    let settings = settings(&below, 1 << 20);
    let mut writer = writer(settings.clone());
    let blocks = [here(1024, 4, 10)];
    assert!(writer.write(at(10), &blocks, &names(&[])).is_err());
    assert!(!writer.has_same(&blocks), "so that the next look writes it");
    std::fs::create_dir(&below).expect("a folder");
    writer.write(at(11), &[here(1024, 4, 11)], &names(&[])).expect("written");
    assert_eq!(history(&settings).blocks[0].span, span(4, None));
    std::fs::OpenOptions::new()
        .append(true)
        .open(&settings.path)
        .and_then(|mut file| {
            use std::io::Write as _;
            file.write_all(b"{\"time\":\"20\xff")
        })
        .expect("a line that was cut off");
    let mut read = 0;
    assert_eq!(file::read(&settings.path, |_| read += 1).expect("read"), 1);
    assert_eq!(read, 2);
}
