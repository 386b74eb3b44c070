# Runs a script of vendor commands and writes each call as a line of words separated by tabs.
# usage: tclsh recording.tcl SCRIPT RECORD
#
# A command that is not listed here, or an option that it does not have, is an error: the lists are of what the vendor
# documents (UG835, UG994, UG1118, UG1393), as far as our scripts use it. Commands that give objects return
# `kind:name`, which the next call records, so that the record shows what was meant.

set record [open [lindex $argv 1] w]

# command: options that take a value, options that take none, what it returns (%0, %1: its positional words)
set commands {
    create_project {-part} {-force} {}
    close_project {} {} {}
    current_project {} {} project
    current_fileset {} {} fileset
    add_files {-fileset} {-norecurse} {}
    set_property {-dict} {} {}
    update_compile_order {-fileset} {} {}
    update_ip_catalog {} {} {}
    ipx::package_project {-root_dir -vendor -library -taxonomy -set_current} {-import_files} {}
    ipx::current_core {} {} core
    ipx::infer_bus_interface {} {} bus:%0
    ipx::associate_bus_interfaces {-busif -clock -reset} {} {}
    ipx::get_bus_interfaces {-of_objects} {} bus:%0
    ipx::add_bus_parameter {} {} parameter:%0
    ipx::get_memory_maps {-of_objects} {} map:%0
    ipx::get_address_blocks {-of_objects} {} block:reg0
    ipx::add_register {} {} register:%0
    ipx::add_field {} {} field:%0:%1
    ipx::update_checksums {} {} {}
    ipx::check_integrity {} {} {}
    ipx::save_core {} {} {}
    package_xo {-xo_path -kernel_name -ctrl_protocol -ip_directory -kernel_xml} {-force} {}
    create_bd_design {} {} {}
    create_bd_cell {-type -vlnv -reference} {} cell:%0
    apply_bd_automation {-rule -config} {} {}
    get_bd_cells {} {} cell:%0
    get_bd_pins {} {} pin:%0
    get_bd_intf_pins {} {} interface:%0
    connect_bd_net {} {} {}
    connect_bd_intf_net {} {} {}
    make_bd_intf_pins_external {-name} {} {}
    get_bd_addr_spaces {} {} space:%0
    get_bd_addr_segs {} {} segment:%0
    assign_bd_address {-offset -range -target_address_space} {} {}
    validate_bd_design {} {} {}
    save_bd_design {} {} {}
    get_files {} {} files:%0
    make_wrapper {-files} {-top} generated:system_wrapper.v
    launch_runs {-to_step -jobs} {} {}
    wait_on_run {} {} {}
    get_runs {} {} run:%0
    open_run {} {} {}
    report_timing_summary {-file} {} {}
    report_utilization {-file} {} {}
    get_timing_paths {-max_paths} {} path
    get_property {} {} {}
    get_cells {-filter} {-hierarchical} {a b c}
    get_pins {-filter} {-hierarchical} pins
    get_ports {} {} port:%0
    create_clock {-name -period} {} {}
    set_false_path {-from -to -through} {} {}
    write_bitstream {} {-force} {}
    write_hw_platform {-file} {-fixed -force} {}
}
set properties {STATUS {route_design Complete!} SLACK 0.25 STARTPOINT_PIN first/C ENDPOINT_PIN last/D}

proc vendor_command {name valued flags result arguments} {
    set line {}
    foreach word [linsert $arguments 0 $name] {
        lappend line [string map [list \\ \\\\ \t \\t \n \\n] $word]
    }
    puts $::record [join $line \t]
    set positional {}
    for {set at 0} {$at < [llength $arguments]} {incr at} {
        set word [lindex $arguments $at]
        if {$word in $valued} {
            incr at
        } elseif {[string match {-[a-z]*} $word]} {
            if {$word ni $flags} { error "$name has no option $word" }
        } else {
            lappend positional $word
        }
    }
    if {$name eq "get_property"} { return [dict get $::properties [lindex $positional 0]] }
    if {$name eq "get_pins"} { return [list pins:[lindex $arguments end]] }
    if {$name in {write_bitstream report_timing_summary report_utilization}} {
        close [open [expr {$name eq "write_bitstream" ? [lindex $positional 0] : [lindex $arguments end]}] w]
    }
    return [string map [list %0 [lindex $positional 0] %1 [lindex $positional 1]] $result]
}

foreach {name valued flags result} $commands {
    if {[string match *::* $name]} { namespace eval [namespace qualifiers $name] {} }
    proc ::$name args "return \[vendor_command [list $name $valued $flags $result] \$args\]"
}
proc unknown args { error "no vendor command is named [lindex $args 0]" }

if {[catch {source [lindex $argv 0]} message]} {
    puts stderr $message
    exit 1
}
close $record
