//! The chart: every work and path as a group of bars, as long as its ratio to plain forwarding; below, nanoseconds per packet of
//! single programs.

use std::fmt::Write as _;

use super::plan::Peer;
use super::report::{Figure, number};

const LEFT: f64 = 270.0;
/// Width of the longest bar.
const BARS: f64 = 400.0;
const WIDTH: f64 = 860.0;
const BAR: f64 = 11.0;
/// How many times plain forwarding the axis shows.
const GREATEST_RATIO: f64 = 2.0;

const STYLE: &str = "text{fill:#24292f}.h{font-weight:600;font-size:15px}.m{fill:#57606a}.bg{fill:#fff}\
.l{stroke:#24292f;stroke-dasharray:3 3}.plain{fill:#8c959f}.netfilter{fill:#bf8700}.ours{fill:#0969da}\
.ours-device{fill:#54aeff}\n@media(prefers-color-scheme:dark){text{fill:#e6edf3}.m{fill:#9198a1}.bg{fill:#0d1117}\
.l{stroke:#e6edf3}.plain{fill:#656c76}.netfilter{fill:#d29922}.ours{fill:#58a6ff}.ours-device{fill:#1f6feb}}";

pub(super) fn svg(figures: &[Figure]) -> String {
    let mut body = String::new();
    for (at, (peer, name)) in [
        (Peer::Plain, "plain"),
        (Peer::Netfilter, "netfilter"),
        (Peer::Ours, "egress-agent"),
        (Peer::OursByDevice, "egress-agent, by the device"),
    ]
    .into_iter()
    .enumerate()
    {
        let x = 20 + 150 * at;
        // Writing to a String cannot fail.
        let _ = writeln!(
            body,
            r#"<rect class="{}" x="{x}" y="36" width="12" height="12"/><text x="{}" y="46">{name}</text>"#,
            peer.name(),
            x + 17
        );
    }
    let (mut y, mut group) = (60.0, None);
    let compared: Vec<&Figure> = figures.iter().filter(|figure| figure.ratio_to_plain.is_some()).collect();
    let top = y;
    for figure in &compared {
        let of = Some((&figure.work, &figure.path));
        if group != of {
            y += 7.0;
            label(&mut body, y, figure);
            group = of;
        }
        let ratio = figure.ratio_to_plain.unwrap_or_default();
        let note = format!("{ratio:.2} · {} {}", number(figure.median), figure.unit);
        bar(&mut body, y, ratio / GREATEST_RATIO, &figure.peer, &note);
        y += BAR + 2.0;
    }
    if !compared.is_empty() {
        let x = LEFT + BARS / GREATEST_RATIO;
        let _ = writeln!(body, r#"<line class="l" x1="{x}" x2="{x}" y1="{top}" y2="{y}"/>"#);
    }
    let single: Vec<&Figure> = figures.iter().filter(|figure| figure.unit == "ns").collect();
    let longest = single.iter().map(|figure| figure.median).fold(1.0, f64::max);
    y += 20.0;
    for figure in single {
        label(&mut body, y, figure);
        bar(&mut body, y, figure.median / longest, &figure.peer, &format!("{} ns", number(figure.median)));
        y += BAR + 2.0;
    }
    let height = y + 20.0;
    format!(
        r#"<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" role="img" aria-labelledby="t d" font-family="system-ui, sans-serif" font-size="11">
<title id="t">Throughput relative to plain forwarding</title>
<desc id="d">The table of the performance page as bars, for each work and path. The dashed line is plain forwarding.</desc>
<style>
{STYLE}
</style>
<rect class="bg" width="{WIDTH}" height="{height}" rx="8"/>
<text class="h" x="20" y="24">Throughput relative to plain forwarding</text>
{body}</svg>
"#
    )
}

fn label(body: &mut String, y: f64, Figure { work, path, .. }: &Figure) {
    let x = LEFT - 10.0;
    let _ = writeln!(body, r#"<text x="{x}" y="{}" text-anchor="end">{work}, {path}</text>"#, y + BAR - 1.0);
}

fn bar(body: &mut String, y: f64, part: f64, peer: &str, note: &str) {
    let width = BARS * part.clamp(0.0, 1.0);
    let _ = writeln!(body, r#"<rect class="{peer}" x="{LEFT}" y="{y}" width="{width:.1}" height="{BAR}"/>"#);
    let x = LEFT + width + 6.0;
    let _ = writeln!(body, r#"<text class="m" x="{x:.1}" y="{}">{note}</text>"#, y + BAR - 1.0);
}
