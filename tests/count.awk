# Counts test cases in the output of `ctest -V`, whose programs speak TAP: "12: ok 3 - name". A program
# that fails, times out or crashes without a "not ok" line counts as one failed case; one that skips as
# a whole (exit status 77) as one skipped case. Prints "passed failed skipped", then the names of what
# failed and was skipped, one a line.

/^ *[0-9]+: (not )?ok [0-9]+/ {
    number = $1
    sub(/:$/, "", number)
    line = $0
    sub(/^ *[0-9]+: /, "", line)
    if (line ~ /# SKIP/) {
        skipped++
        skips[number]++
        detail = detail "\nskipped: " line
    } else if (line ~ /^not ok/) {
        failed++
        fails[number]++
        detail = detail "\nfailed: " line
    } else {
        passed++
    }
}

/^ *[0-9]+\/[0-9]+ Test +#[0-9]+: / {
    match($0, /#[0-9]+/)
    number = substr($0, RSTART + 1, RLENGTH - 1)
    name = $0
    sub(/^[^:]*: /, "", name)
    sub(/ .*/, "", name)
    if ($0 ~ /\*\*\*Skipped/ && !skips[number]) {
        skipped++
        detail = detail "\nskipped: " name
    }
    if ($0 ~ /\*\*\*(Failed|Timeout|Exception)|\*\*\*Not Run|Subprocess aborted|SegFault/ && !fails[number]) {
        failed++
        detail = detail "\nfailed: " name " (as a whole)"
    }
}

END { print passed + 0, failed + 0, skipped + 0 detail }
